"""The weight files of a model directory and the fingerprint that tells two models apart. Torch-free."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import cast

from pdserve.errors import ConfigError
from pdserve.model.config import ModelConfig

_SAMPLE_BYTES = 4096
"""Read from the middle of each tensor: training changes every tensor, and hashing all bytes would take seconds."""

_MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors format."""


def weight_files(model_dir: Path) -> list[Path]:
    """The `*.safetensors` files in name order. Raises: `ConfigError` when there are none."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{model_dir} has no weights: no *.safetensors file in it")
    return paths


def fingerprint(model_dir: Path, config: ModelConfig) -> str:
    """Equal for two directories exactly when their KV is exchangeable: same architecture, same weights."""
    digest = hashlib.sha256()
    digest.update(json.dumps(asdict(config), sort_keys=True, default=_enum_value).encode())
    for path in weight_files(model_dir):
        for identity in _tensor_identities(path):
            digest.update(identity)
    return digest.hexdigest()[:32]


def _enum_value(field: object) -> object:
    if not isinstance(field, Enum):
        raise TypeError(f"{field!r} has no place in a fingerprint")
    return field.value


def _tensor_identities(path: Path) -> Iterator[bytes]:
    """Name, type, shape and a sample of the bytes of each tensor."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is not a safetensors file: its header would have {header_bytes} bytes")
        try:
            header = cast(dict[str, dict[str, object]], json.loads(file.read(header_bytes)))
        except ValueError as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, stop = cast(tuple[int, int], header[name]["data_offsets"])
            yield f"{name} {header[name]['dtype']} {header[name]['shape']}".encode()
            file.seek(8 + header_bytes + (start + stop) // 2 - min(_SAMPLE_BYTES, stop - start) // 2)
            yield file.read(min(_SAMPLE_BYTES, stop - start))
