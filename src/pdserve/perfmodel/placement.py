"""A model on the accelerators of one worker: what fits."""

from dataclasses import dataclass

from pdserve.perfmodel.hardware import Hardware
from pdserve.perfmodel.model_shape import ModelShape

USABLE_MEMORY = 0.9
"""Of an accelerator's memory; activations, graphs and libraries have the rest. What vLLM takes by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Attention is cut over `tensor_parallel_size` ranks and copied `data_parallel_size` times; experts are spread over
    all of them."""

    hardware: Hardware
    shape: ModelShape
    tensor_parallel_size: int
    data_parallel_size: int = 1

    @property
    def num_accelerators(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def weight_bytes(self) -> float:
        """On each accelerator."""
        shape = self.shape
        params = shape.dense_params / self.tensor_parallel_size + shape.expert_params / self.num_accelerators
        return params * shape.param_bytes

    @property
    def kv_tokens(self) -> int:
        """That the cache of one data-parallel rank holds; 0 when the weights alone do not fit."""
        free_bytes = USABLE_MEMORY * self.hardware.memory_bytes - self.weight_bytes
        return max(0, int(free_bytes / self.shape.kv_rank_token_bytes(self.tensor_parallel_size)))

    def __str__(self) -> str:
        return f"{self.shape.name} on {self.hardware.name} TP{self.tensor_parallel_size} DP{self.data_parallel_size}"
