"""What a drafter comes to before anything is loaded: its cache, the fingerprint, and what does not go together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from tests.pure.drafting_engine import DraftingEngine, spec_of
from tests.pure.tiny_checkpoints import NUM_LAYERS, write_checkpoint
from tests.pure.tiny_heads import write_deepseek_with_mtp, write_eagle

from pdserve.config.speculation import Drafter
from pdserve.engine.port import EngineSpec
from pdserve.engine.rank_protocol import RankStart, encode_frame, request_decoder, take_frames
from pdserve.engine.shape import info_of
from pdserve.errors import ConfigError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    dirs = {name: tmp_path_factory.mktemp(name) for name in ("llama", "qwen3", "eagle", "deepseek-v3", "mtp")}
    for name in ("llama", "qwen3", "deepseek-v3"):
        write_checkpoint(name, dirs[name])
    write_eagle(dirs["eagle"])
    write_deepseek_with_mtp(dirs["mtp"])
    return dirs


@pytest.fixture
def other_draft(written: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """The directory of the Qwen3 checkpoint with other fields in `config.json`."""

    def write(**changes: Any) -> Path:
        fields = json.loads((written["qwen3"] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        (tmp_path / "model.safetensors").symlink_to(written["qwen3"] / "model.safetensors")
        return tmp_path

    return write


def draft_spec(written: dict[str, Path], draft_dir: Path) -> EngineSpec:
    return spec_of(written["llama"], Drafter.DRAFT_MODEL, draft_dir)


def test_cache_of_each_drafter_is_whole_and_has_the_pages_of_the_model(written: dict[str, Path]) -> None:
    layouts = [
        info_of(spec).draft_layout
        for spec in (
            draft_spec(written, written["qwen3"]),
            spec_of(written["llama"], Drafter.EAGLE, written["eagle"]),
            spec_of(written["mtp"], Drafter.MTP),
        )
    ]
    found = [(layout.num_layers, layout.num_kv_heads, layout.num_planes) for layout in layouts if layout is not None]
    assert found == [(NUM_LAYERS, 2, 2), (1, 2, 2), (1, 1, 1)]
    assert {(layout.page_slots, layout.dtype) for layout in layouts if layout is not None} == {(8, "float32")}


def test_n_grams_need_nothing_of_the_engine(written: dict[str, Path]) -> None:
    plain, with_ngrams = info_of(spec_of(written["llama"])), info_of(spec_of(written["llama"], Drafter.NGRAM))
    assert with_ngrams == plain
    assert (plain.draft_layout, plain.num_counted_layers) == (None, NUM_LAYERS)


def test_fingerprint_tells_drafters_apart_but_not_how_far_they_guess(written: dict[str, Path]) -> None:
    llama, qwen3, eagle = written["llama"], written["qwen3"], written["eagle"]
    specs = [
        spec_of(llama),
        spec_of(llama, Drafter.DRAFT_MODEL, llama),
        spec_of(llama, Drafter.DRAFT_MODEL, qwen3),
        spec_of(llama, Drafter.EAGLE, eagle),
        spec_of(qwen3, Drafter.DRAFT_MODEL, llama),
    ]
    fingerprints = [info_of(spec).model_fingerprint for spec in specs]
    assert len(set(fingerprints)) == len(specs)
    assert {len(fingerprint) for fingerprint in fingerprints} == {32}
    farther = info_of(spec_of(llama, Drafter.EAGLE, eagle, num_draft_tokens=7))
    assert farther.model_fingerprint == fingerprints[3]


def test_draft_model_of_another_vocabulary_is_refused(
    written: dict[str, Path], other_draft: Callable[..., Path]
) -> None:
    with pytest.raises(
        ConfigError, match=r"has a vocabulary of 150 tokens, the model one of 131: name a smaller model"
    ):
        info_of(draft_spec(written, other_draft(vocab_size=150)))


def test_draft_model_of_a_shorter_context_is_taken(written: dict[str, Path], other_draft: Callable[..., Path]) -> None:
    assert info_of(draft_spec(written, other_draft(max_position_embeddings=64))).max_model_len == 256


def write_tokenizer(model_dir: Path, vocab: object, added: dict[str, int]) -> None:
    fields = {
        "model": {"vocab": vocab},
        "added_tokens": [{"content": content, "id": token_id} for content, token_id in added.items()],
    }
    (model_dir / "tokenizer.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("vocab", "added", "differing"),
    [
        ({"a": 0, "b": 1}, {"<s>": 2}, None),
        ({"a": 0, "b": 1, "<s>": 2}, {}, None),
        ([["a", -1.5], ["b", -2.5]], {"<s>": 2}, None),
        ({"a": 1, "b": 0}, {"<s>": 2}, "a"),
        ({"a": 0, "b": 1}, {"<s>": 3}, "<s>"),
        ({"a": 0, "b": 1}, {}, "<s>"),
        ({"a": 0, "b": 1, "c": 3}, {"<s>": 2}, "c"),
    ],
)
def test_draft_model_must_have_the_same_id_for_each_token(
    vocab: object, added: dict[str, int], differing: str | None, tmp_path: Path, written: dict[str, Path]
) -> None:
    dirs = [tmp_path / name for name in ("model", "draft")]
    for model_dir in dirs:
        model_dir.mkdir()
        for name in ("config.json", "model.safetensors"):
            (model_dir / name).symlink_to(written["llama"] / name)
    spec = spec_of(dirs[0], Drafter.DRAFT_MODEL, dirs[1])
    write_tokenizer(dirs[0], {"a": 0, "b": 1}, {"<s>": 2})
    info_of(spec)
    write_tokenizer(dirs[1], vocab, added)
    if differing is None:
        info_of(spec)
    else:
        with pytest.raises(ConfigError, match=f"is not the model's: they differ in '{differing}'"):
            info_of(spec)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"model": {"vocab": [1]}, "added_tokens": []}'])
def test_tokenizer_that_is_broken_is_refused(content: str, tmp_path: Path, written: dict[str, Path]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(written["llama"] / name)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        info_of(spec_of(tmp_path, Drafter.DRAFT_MODEL, tmp_path))


def test_mtp_of_a_checkpoint_without_a_module_is_refused(written: dict[str, Path]) -> None:
    for name in ("deepseek-v3", "llama"):
        with pytest.raises(ConfigError, match="the model has no MTP module"):
            info_of(spec_of(written[name], Drafter.MTP))


@pytest.mark.parametrize(("field", "value"), [("hidden_dim", 64), ("vocab_size", 99)])
def test_head_of_another_model_is_refused(field: str, value: int, tmp_path: Path, written: dict[str, Path]) -> None:
    write_eagle(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=rf"{value} is not the model's, (48|131): name a head"):
        info_of(spec_of(written["llama"], Drafter.EAGLE, tmp_path))


def test_directory_that_is_not_there_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    for drafter in (Drafter.DRAFT_MODEL, Drafter.EAGLE):
        spec = spec_of(written["llama"], drafter, tmp_path / "missing")
        with pytest.raises(ConfigError, match=r"missing has no config\.json"):
            info_of(spec)


def test_head_that_lacks_a_tensor_is_refused(tmp_path: Path, written: dict[str, Path]) -> None:
    write_eagle(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the weights have no tensor fc\.weight"):
        DraftingEngine(spec_of(written["llama"], Drafter.EAGLE, tmp_path))


def test_speculation_travels_to_the_rank_as_it_is(written: dict[str, Path]) -> None:
    spec = spec_of(written["llama"], Drafter.EAGLE, written["eagle"], num_draft_tokens=3)
    message = RankStart(spec=spec, rank=0, cpus=(), rendezvous_fd=None)
    (payload,) = take_frames(bytearray(encode_frame(message)))
    assert request_decoder.decode(payload) == message
