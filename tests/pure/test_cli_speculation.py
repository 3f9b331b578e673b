"""The flags of speculation: what they come to, and what is said of those that make no sense."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.cli.speculation import add_speculation_flags, requested_speculation, speculation_flags
from pdserve.config.speculation import DEFAULT_NUM_DRAFT_TOKENS, Drafter, Speculation
from pdserve.errors import ConfigError


def write_model(folder: Path, *, vocab_size: int = 256) -> Path:
    """All that is looked at before anything loads. Has no MTP module."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": vocab_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def requested(flags: Sequence[str], model_dir: Path) -> Speculation | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_speculation_flags(parser)
    return requested_speculation(parser.parse_args(flags), model_dir)


def test_no_flags_are_no_speculation(model_dir: Path) -> None:
    assert requested([], model_dir) is None
    assert speculation_flags(None) == ()


def test_ngrams_need_a_kind_alone(model_dir: Path) -> None:
    assert requested(["--speculate", "ngram"], model_dir) == Speculation(drafter=Drafter.NGRAM)


def test_drafter_is_found_by_its_kind_and_name(model_dir: Path) -> None:
    parser = argparse.ArgumentParser()
    add_speculation_flags(parser)
    asked: list[tuple[Drafter, str]] = []

    def find(drafter: Drafter, named: str) -> Path:
        asked.append((drafter, named))
        return model_dir

    arguments = parser.parse_args(["--speculate", "draft:some/name:v2"])
    speculation = requested_speculation(arguments, model_dir, find=find)
    assert asked == [(Drafter.DRAFT_MODEL, "some/name:v2")]
    assert speculation == Speculation(drafter=Drafter.DRAFT_MODEL, model_dir=str(model_dir))


@pytest.mark.parametrize("flags", [("ngram",), ("ngram", "3"), ("draft:{}",), ("draft:{}", "16")])
def test_flags_spelled_for_a_child_mean_the_same_there(flags: tuple[str, ...], model_dir: Path) -> None:
    kind, *number = flags
    typed = ["--speculate", kind.format(model_dir), *(part for n in number for part in ("--num-draft-tokens", n))]
    speculation = requested(typed, model_dir)
    assert speculation is not None
    assert speculation.num_draft_tokens == (int(number[0]) if number else DEFAULT_NUM_DRAFT_TOKENS)
    assert requested(speculation_flags(speculation), model_dir) == speculation


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--speculate guess", "--speculate guess is none of ngram, draft:DIR, mtp, eagle:DIR"),
        ("--speculate draft", "--speculate draft names no model: say which, as in draft:DIR"),
        ("--speculate eagle:", "--speculate eagle: names no model: say which, as in eagle:DIR"),
        ("--speculate mtp:there", "--speculate mtp needs no model: leave :there out"),
        ("--speculate ngram:", "--speculate ngram needs no model: leave : out"),
        ("--speculate eagle:/not/there", "--speculate eagle:/not/there: /not/there is not a directory"),
        ("--speculate draft:/not/there", "/not/there is not a directory"),
        ("--speculate ngram --num-draft-tokens 17", r"17 draft tokens are outside \[1, 16\]"),
        ("--speculate ngram --num-draft-tokens 0", r"0 draft tokens are outside \[1, 16\]"),
        ("--num-draft-tokens 3", "--num-draft-tokens is for --speculate: give that too, such as --speculate ngram"),
        ("--speculate mtp", "the model has no MTP module"),
    ],
)
def test_flags_that_make_no_sense_are_refused_with_what_to_type(flags: str, said: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        requested(flags.split(), model_dir)


def test_draft_model_of_another_vocabulary_is_refused_before_anything_loads(model_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=255)
    with pytest.raises(ConfigError, match="has a vocabulary of 255 tokens, the model one of 256"):
        requested(["--speculate", f"draft:{other}"], model_dir)
