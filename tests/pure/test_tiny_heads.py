"""The heads of the tiny models: some of their guesses are right, and hardly any with a wrong hidden state.

Shape suffixes: T tokens, E hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.pure.sequence_cache import SequenceCache

from pdserve.bench.tiny_models import TINY_EAGLE_MODEL, prepare_tiny, prepare_tiny_eagle
from pdserve.model.config import read_config
from pdserve.model.draft_head import DraftHeadModule
from pdserve.model.eagle import load_eagle
from pdserve.model.mtp import load_mtp

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS = 8, 12, 40


def load_head(kind: str) -> DraftHeadModule:
    target_dir = prepare_tiny(TINY_EAGLE_MODEL)
    target = read_config(target_dir)
    where: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    if kind == "mtp":
        return load_mtp(target_dir, target, **where)
    return load_eagle(prepare_tiny_eagle(), target_dir, target, **where)


@pytest.fixture(scope="module")
def texts() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Greedy text of the model: token_ids_T, hidden states after the final norm hidden_TE, next_T."""
    transformers: Any = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(prepare_tiny(TINY_EAGLE_MODEL), dtype=torch.float32)
    random = np.random.default_rng(3)
    prompts = torch.from_numpy(  # pyright: ignore[reportUnknownMemberType]
        random.integers(5, model.config.vocab_size, size=(NUM_PROMPTS, NUM_PROMPT_TOKENS))
    )
    settings = {"max_new_tokens": NUM_ANSWER_TOKENS, "min_new_tokens": NUM_ANSWER_TOKENS, "do_sample": False}
    with torch.inference_mode():
        tokens = model.generate(prompts, **settings, attention_mask=torch.ones_like(prompts))
        hidden = model.model(tokens).last_hidden_state
        following = model.lm_head(hidden).argmax(-1)
    return list(zip(tokens, hidden, following, strict=True))


def of_the_token_before(hidden_TE: torch.Tensor) -> torch.Tensor:
    return hidden_TE[:-1]


def of_one_token_earlier(hidden_TE: torch.Tensor) -> torch.Tensor:
    return torch.cat((hidden_TE[:1], hidden_TE[:-2]))


def of_one_token_later(hidden_TE: torch.Tensor) -> torch.Tensor:
    return hidden_TE[1:]


def of_the_first_token(hidden_TE: torch.Tensor) -> torch.Tensor:
    return hidden_TE[:1].expand(len(hidden_TE) - 1, -1)


def of_none(hidden_TE: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden_TE[1:])


@torch.inference_mode()
def acceptance(
    head: DraftHeadModule,
    texts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    previous_of: Callable[[torch.Tensor], torch.Tensor],
) -> float:
    """Share of the guesses right after a token of the model's own, with these hidden states of the token before."""
    num_right = num_guesses = 0
    for token_ids_T, hidden_TE, next_T in texts:
        positions_T = torch.arange(len(token_ids_T) - 1)
        states_TE = head.forward(
            token_ids_T[1:], previous_of(hidden_TE), positions_T, SequenceCache(), lambda layer_index: None
        )
        is_right_T = (head.logits(states_TE).argmax(-1) == next_T[1:])[NUM_PROMPT_TOKENS - 1 :]
        num_right, num_guesses = num_right + int(is_right_T.sum()), num_guesses + len(is_right_T)
    return num_right / num_guesses


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_tiny_head_guesses_about_half_of_the_text_and_hardly_any_with_another_hidden_state(
    kind: str, texts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> None:
    head = load_head(kind)
    assert 0.35 < acceptance(head, texts, of_the_token_before) < 0.75
    for previous_of in (of_one_token_earlier, of_one_token_later, of_the_first_token, of_none):
        assert acceptance(head, texts, previous_of) < 0.2
