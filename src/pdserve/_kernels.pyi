"""CPU kernels of the engine, and the tick of the layer counter."""

import numpy as np
from numpy.typing import NDArray

class CounterTicker:
    """The ticking end of a layer counter region."""

    def __init__(self, region: NDArray[np.uint8]) -> None: ...
    def tick(self) -> None:
        """Count one layer, or the end of a pass, and wake who waits."""

    @property
    def ticks(self) -> int: ...

class PackedMatrix:
    """A weight matrix in the order in which the kernels read it."""

    @staticmethod
    def plain(weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> PackedMatrix: ...
    @staticmethod
    def swiglu(gate: NDArray[np.float32], up: NDArray[np.float32]) -> PackedMatrix: ...

class PassPlan:
    """Positions, pages and attention tasks of the tokens of one pass."""

    @property
    def num_tokens(self) -> int: ...

class PagedCache:
    """Pages [layer][page][head][K, V][slot][dim] with their rotary tables."""

    def __init__(
        self, pages: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32], *, num_heads: int
    ) -> None: ...
    def plan(
        self, starts: NDArray[np.int32], lengths: NDArray[np.int32], page_tables: NDArray[np.int32]
    ) -> PassPlan:
        """Raises: ValueError for a position, page table or page outside the cache."""

class CpuKernels:
    """The kernels of one instruction set on a pool of threads."""

    def __init__(self, num_threads: int, instruction_set: str = "") -> None: ...
    @staticmethod
    def instruction_sets() -> list[str]:
        """What this machine can run, best first."""

    @property
    def instruction_set(self) -> str: ...
    def linear(self, x: NDArray[np.float32], weight: PackedMatrix, out: NDArray[np.float32]) -> None:
        """out = x W^T + bias, or silu(x G^T) * (x U^T)."""

    def linear_add(self, x: NDArray[np.float32], weight: PackedMatrix, out: NDArray[np.float32]) -> None:
        """out += x W^T + bias."""

    def rms_norm(
        self, x: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32], eps: float
    ) -> None: ...
    def append(
        self,
        cache: PagedCache,
        plan: PassPlan,
        layer_index: int,
        qkv: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norm and rotate queries in place; write keys and values into their pages."""

    def attend(
        self,
        cache: PagedCache,
        plan: PassPlan,
        layer_index: int,
        qkv: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """Causal attention of the pass's queries over the pages of their sequences."""
