"""The tiny models that are made on the fly: as good for a check of greedy tokens as a real one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pure.paged_runs import Paged, logits_in_chunks

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.tiny_models import TINY_NAMES, prepare_tiny
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer

NUM_PROMPT_TOKENS = 150
NUM_STEPS = 12
MIN_GAP = 1e-3
"""Between the two best logits: far above what the order of additions changes."""


@pytest.mark.parametrize("name", TINY_NAMES)
def test_greedy_tokens_of_each_tiny_model_vary_and_equal_those_of_transformers(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model_dir = prepare_tiny(name)
    prompt = Tokenizer.load(model_dir).encode(NATURAL_TEXT.read_text())[:NUM_PROMPT_TOKENS]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    settings = {"max_new_tokens": NUM_STEPS, "min_new_tokens": NUM_STEPS, "do_sample": False}
    token_ids: list[int] = reference.generate(torch.tensor([prompt]), **settings)[0].tolist()
    stops = [100, *range(NUM_PROMPT_TOKENS, len(token_ids))]
    logits_TV = logits_in_chunks(Paged.load(model_dir), token_ids[:-1], stops)[NUM_PROMPT_TOKENS - 1 :]
    generated = token_ids[NUM_PROMPT_TOKENS:]
    assert [int(token_id) for token_id in logits_TV.argmax(-1)] == generated
    assert len(set(generated)) > NUM_STEPS // 2
    best_TK = logits_TV.topk(2).values
    assert (best_TK[:, 0] - best_TK[:, 1]).min() > MIN_GAP


def test_tiny_model_has_the_tokenizer_and_chat_template_of_the_default_model() -> None:
    pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(prepare_tiny(TINY_NAMES[0]))
    assert tokenizer.chat_template is not None
    assert tokenizer.decode(tokenizer.encode("In 1984")) == "In 1984"


def test_tiny_model_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tiny-llama' is no tiny model; known are tiny-deepseek, tiny"):
        prepare_tiny("tiny-llama")


def test_tiny_model_without_transformers_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install 'transformers"):
        prepare_tiny(TINY_NAMES[0])
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{TINY_NAMES[0]}.lock"]
