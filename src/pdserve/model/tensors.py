"""The tensors of a checkpoint's safetensors files, read row by row."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError
from pdserve.model.checkpoint import weight_files
from pdserve.model.weight_rows import Rows


class CheckpointTensors:
    """All tensors of a directory by name, whichever file holds them.

    Lifetime: the files stay mapped as long as this object.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._file_of: dict[str, _OpenFile] = {}
        for path in weight_files(model_dir):
            file = _open(path)
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def read(self, rows: Rows, *, row_shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises: `ConfigError` when the tensor is missing or has another shape, as a whole, than was cut."""
        stored = self._stored(rows.tensor)
        found = stored.get_shape()
        num_rows = found[0] if rows.cut is None else rows.cut.total
        if found != [num_rows, *row_shape]:
            raise ConfigError(
                f"{self._model_dir}: {rows.tensor} has shape {tuple(found)}, "
                f"but config.json asks for {(num_rows, *row_shape)}"
            )
        ours = range(num_rows) if rows.cut is None else rows.cut.ours
        return stored[ours.start : ours.stop].to(torch.float32 if rows.keeps_float32 else dtype)

    def _stored(self, name: str) -> "_StoredTensor":
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._model_dir}: the weights have no tensor {name}")
        return file.get_slice(name)


class _StoredTensor(Protocol):
    """What is used of safetensors' slice, which has no types."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class _OpenFile(Protocol):
    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> _StoredTensor: ...


def _open(path: Path) -> _OpenFile:
    try:
        return cast(_OpenFile, safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
