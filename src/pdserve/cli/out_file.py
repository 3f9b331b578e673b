"""Files that commands write when all is done."""

from pathlib import Path

import msgspec

from pdserve.errors import ConfigError


def require_folder_of(flag: str, path: Path) -> None:
    """For before a long measurement, not after it. Raises: `ConfigError` when the file's folder is not there."""
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: {path.parent} is not a directory; make it first")


def write_json(path: Path, document: object) -> None:
    """Indented, for people too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
