"""What a draft model reads in each pass: nothing that it has read ahead and guessed right."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.pure.tiny_checkpoints import NUM_LAYERS, random_tokens, write_checkpoint

from pdserve.engine.draft_model import DraftModel
from pdserve.engine.drafter import Followed
from pdserve.engine.executor import Executor
from pdserve.engine.executor_loading import load_executor
from pdserve.engine.kv_storage import KvStorage
from pdserve.ids import SequenceId
from pdserve.model.config import read_config
from pdserve.model.decoder import OnLayer
from pdserve.model.parallel import SingleRank
from pdserve.schedule.batch import Chunk

PROMPT = tuple(random_tokens(1, 11))
MAX_MODEL_LEN = 40


class RecordingExecutor:
    """Knows what was read, by the first position."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.read: list[tuple[int, tuple[int, ...]]] = []

    def forward(self, chunks: Sequence[Chunk], on_layer: OnLayer) -> torch.Tensor:
        self.read += [(chunk.start, chunk.token_ids) for chunk in chunks]
        return self._executor.forward(chunks, on_layer)

    def final_norm(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._executor.final_norm(x_RE)

    def logits(self, normed_RE: torch.Tensor) -> torch.Tensor:
        return self._executor.logits(normed_RE)


class Setting:
    def __init__(self, model_dir: Path) -> None:
        config = read_config(model_dir)
        storage = KvStorage.create(layout=config.kv_layout(page_slots=8, dtype="float32"), num_pages=8)
        loaded = load_executor(model_dir, config, storage, communicator=SingleRank(), num_threads=1)
        self.executor = RecordingExecutor(loaded)
        self.drafter = DraftModel(self.executor, storage, max_model_len=MAX_MODEL_LEN, num_draft_tokens=4)
        self.ticks: list[int] = []

    def follow(self, start: int, token_ids: Sequence[int], sampled_token_id: int | None) -> tuple[int, ...]:
        """The guesses."""
        followed = Followed(
            sequence_id=SequenceId(1),
            start=start,
            token_ids=tuple(token_ids),
            page_indices=(3, 0, 5, 1, 2, 4),
            hidden_TE=None,
            sampled_token_id=sampled_token_id,
            carry_E=None,
        )

        def on_layer(layer_index: int) -> None:
            self.ticks.append(layer_index)

        self.executor.read.clear()
        return self.drafter.follow([followed], on_layer, _most_likely).get(SequenceId(1), ())


def _most_likely(logits_RV: torch.Tensor, sequence_ids: Sequence[SequenceId], num_ahead: int) -> list[int]:
    del sequence_ids, num_ahead
    return [int(token_id) for token_id in logits_RV.argmax(dim=-1)]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    write_checkpoint("llama", tmp_path)
    return Setting(tmp_path)


def test_newest_token_and_all_guesses_but_the_last_are_read_ahead(setting: Setting) -> None:
    guesses = setting.follow(0, PROMPT, 77)
    assert setting.executor.read == [
        (0, (*PROMPT, 77)),
        *((len(PROMPT) + 1 + index, (guesses[index],)) for index in range(3)),
    ]
    assert setting.ticks == list(range(NUM_LAYERS))


@pytest.mark.parametrize("num_right", range(5))
def test_what_was_read_ahead_and_is_right_is_not_read_again(num_right: int, setting: Setting) -> None:
    guesses = setting.follow(0, PROMPT, 77)
    setting.follow(len(PROMPT), (77, *guesses[:num_right]), 78)
    start, token_ids = setting.executor.read[0]
    assert (start, token_ids) == (len(PROMPT) + 1 + min(num_right, 3), (*guesses[3:num_right], 78))


def test_newest_token_that_was_a_guess_is_read_for_its_logits(setting: Setting) -> None:
    """The scheduler may try fewer guesses than there are."""
    guesses = setting.follow(0, PROMPT, 77)
    again = setting.follow(len(PROMPT), (77,), guesses[0])
    assert setting.executor.read[0] == (len(PROMPT) + 1, (guesses[0],))
    assert again[:3] == guesses[1:]


def test_tokens_behind_the_context_are_not_read(setting: Setting) -> None:
    """Of a draft model whose context is shorter than the model's; its layers tick all the same."""
    long_prompt = random_tokens(2, MAX_MODEL_LEN + 3)
    assert setting.follow(0, long_prompt[:30], None) == ()
    assert setting.follow(30, long_prompt[30:], 5) == ()
    assert setting.executor.read == [(30, tuple(long_prompt[30:MAX_MODEL_LEN]))]
    assert setting.follow(MAX_MODEL_LEN + 3, [5], 6) == ()
    assert setting.executor.read == []
    assert setting.ticks == 3 * list(range(NUM_LAYERS))
