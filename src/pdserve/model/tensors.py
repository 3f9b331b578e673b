"""The tensors of a checkpoint's safetensors files, read row by row, and dequantised where they are stored in 8 bits."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError
from pdserve.model.checkpoint import weight_files
from pdserve.model.weight_rows import Rows
from pdserve.units import div_ceil

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
_FP8_DTYPE = "F8_E4M3"
_SCALE_SUFFIX = "_scale_inv"
"""Of the tensor of factors by which the blocks of an 8-bit tensor are multiplied."""


class CheckpointTensors:
    """All tensors of a directory by name, whichever file holds them.

    Lifetime: the files stay mapped as long as this object.
    """

    def __init__(self, model_dir: Path, *, fp8_block: tuple[int, int] | None) -> None:
        self._model_dir = model_dir
        self._fp8_block = fp8_block
        self._file_of: dict[str, _OpenFile] = {}
        for path in weight_files(model_dir):
            file = _open(path)
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(self, rows: Rows, *, parameter_shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Raises: `ConfigError` when the tensor is missing or has another shape, as a whole, than was cut."""
        stored = self._stored(rows.tensor)
        num_rows = parameter_shape[0] if rows.cut is None else rows.cut.total
        self._require_shape(rows.tensor, stored, [num_rows, *parameter_shape[1:]])
        ours = range(num_rows) if rows.cut is None else rows.cut.ours
        values = stored[ours.start : ours.stop]
        stored_dtype = stored.get_dtype()
        if stored_dtype == _FP8_DTYPE:
            values = self._dequantised(rows.tensor, values, ours, num_rows=num_rows)
        elif stored_dtype not in _PLAIN_DTYPES:
            raise ConfigError(f"{self._model_dir}: {rows.tensor} is stored as {stored_dtype}, which is not supported")
        return values.to(torch.float32 if rows.keeps_float32 else dtype)

    def _dequantised(self, name: str, values: torch.Tensor, rows: range, *, num_rows: int) -> torch.Tensor:
        """In float32. Blocks are of the whole tensor: the rows may begin and end inside one."""
        if self._fp8_block is None:
            raise ConfigError(f"{self._model_dir}: {name} is stored in 8 bits, but config.json names no block size")
        block_rows, block_columns = self._fp8_block
        num_columns = values.shape[1]
        stored = self._stored(name + _SCALE_SUFFIX)
        shape = [div_ceil(num_rows, block_rows), div_ceil(num_columns, block_columns)]
        self._require_shape(name + _SCALE_SUFFIX, stored, shape)
        scales = stored[0 : shape[0]].float()
        block_of_row = torch.arange(rows.start, rows.stop) // block_rows
        block_of_column = torch.arange(num_columns) // block_columns
        return values.float() * scales[block_of_row][:, block_of_column]

    def _stored(self, name: str) -> "_StoredTensor":
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._model_dir}: the weights have no tensor {name}")
        return file.get_slice(name)

    def _require_shape(self, name: str, stored: "_StoredTensor", expected: list[int]) -> None:
        found = stored.get_shape()
        if found != expected:
            raise ConfigError(
                f"{self._model_dir}: {name} has shape {tuple(found)}, but config.json asks for {tuple(expected)}"
            )


class _StoredTensor(Protocol):
    """What is used of safetensors' slice, which has no types."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class _OpenFile(Protocol):
    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> _StoredTensor: ...


def _open(path: Path) -> _OpenFile:
    try:
        return cast(_OpenFile, safe_open(path, framework="pt"))
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
