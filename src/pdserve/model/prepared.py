"""Model directories that this machine makes for itself, in the cache.

A directory is made once: a second starter waits for the first. It appears whole or not at all. Torch-free.
"""

import fcntl
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pdserve.config.environment import cache_dir
from pdserve.errors import ConfigError

_RECIPE_NAME = "conversion.json"

_LOCK_TIMEOUT_S = 300.0
"""A model takes 5 to 10 s here; a holder that needs longer than this hangs."""
_LOCK_POLL_S = 0.1

_log = logging.getLogger(__name__)


def prepared_dir(name: str, *, recipe: Mapping[str, object], fill: Callable[[Path], None]) -> Path:
    """The directory of a model, which `fill` writes when it is not there yet, or was made by another recipe.

    Raises: `ConfigError` when the disk is full or can't be written; and what `fill` raises.
    Threads: any number of processes may call it at once.
    """
    models_dir = cache_dir() / "models"
    target_dir = models_dir / name
    if _is_current(target_dir, recipe):
        return target_dir
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{name}.lock"):
            if not _is_current(target_dir, recipe):
                _make(target_dir, recipe, fill)
    except OSError as error:
        raise ConfigError(f"the model {name} can't be prepared in {models_dir}: {error}") from error
    return target_dir


def _is_current(target_dir: Path, recipe: Mapping[str, object]) -> bool:
    try:
        return json.loads((target_dir / _RECIPE_NAME).read_text()) == recipe
    except (OSError, ValueError):
        return False


def _make(target_dir: Path, recipe: Mapping[str, object], fill: Callable[[Path], None]) -> None:
    _log.info("model_preparation_started target=%s", target_dir)
    temporary_dir = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}.", dir=target_dir.parent))
    try:
        fill(temporary_dir)
        (temporary_dir / _RECIPE_NAME).write_text(json.dumps(recipe))
        temporary_dir.chmod(0o755)
        if target_dir.exists():
            shutil.rmtree(target_dir)
        temporary_dir.rename(target_dir)
    except BaseException:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        raise
    _log.info("model_preparation_ended target=%s", target_dir)


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
