"""CPU kernels of the engine, and the tick of the layer counter."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


class CounterTicker:
    """The ticking end of a layer counter region."""

    def __init__(self, region: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def tick(self) -> None:
        """Count one layer, or the end of a pass, and wake who waits."""

    @property
    def ticks(self) -> int: ...

class PackedMatrix:
    """A weight matrix in the order in which the kernels read it."""

    @staticmethod
    def plain(weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> PackedMatrix: ...

    @staticmethod
    def swiglu(gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> PackedMatrix: ...

class PassPlan:
    """Positions, pages and attention tasks of the tokens of one pass."""

    @property
    def num_tokens(self) -> int: ...

class PagedCache:
    """Pages [layer][page][head][K, V][slot][dim] with their rotary tables."""

    def __init__(self, pages: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None, None, None), order='C', device='cpu')], cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], *, num_heads: int) -> None: ...

    def plan(self, starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], page_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> PassPlan:
        """
        Raises: ValueError for a position, page table or page outside the cache.
        """

class CpuKernels:
    """The kernels of one instruction set on a pool of threads."""

    def __init__(self, num_threads: int, instruction_set: str = '') -> None: ...

    @staticmethod
    def instruction_sets() -> list[str]:
        """What this machine can run, best first."""

    @property
    def instruction_set(self) -> str: ...

    def linear(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: PackedMatrix, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out = x W^T + bias, or silu(x G^T) * (x U^T)."""

    def linear_add(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: PackedMatrix, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """out += x W^T + bias."""

    def rms_norm(self, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], eps: float) -> None: ...

    def append(self, cache: PagedCache, plan: PassPlan, layer_index: int, qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, k_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, eps: float = 0.0) -> None:
        """
        Norm and rotate queries in place; write keys and values into their pages.
        """

    def attend(self, cache: PagedCache, plan: PassPlan, layer_index: int, qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Causal attention of the pass's queries over the pages of their sequences.
        """
