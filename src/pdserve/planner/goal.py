"""What a fleet is planned for."""

from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.hardware import Hardware
from pdserve.perfmodel.known import known_model, stored_profile
from pdserve.perfmodel.model_shape import ModelShape
from pdserve.perfmodel.placement import Placement
from pdserve.planner.load import PlannedLoad
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    hardware: Hardware
    shape: ModelShape
    workload: PlannedLoad
    ttft_s: float
    tpot_s: float
    """The mean of a request."""
    attainment: float = 0.9
    """The share of requests that keep within both."""
    max_accelerators: int = 1024
    tables: Path | None = None
    """As of `known_model`."""
    drafting: Drafting = NO_DRAFTS

    @property
    def num_uncached_tokens(self) -> int:
        """Of a prompt, that no earlier one has left in a prefix cache."""
        return max(1, self.workload.num_prompt_tokens - self.workload.num_prefix_tokens)

    @property
    def num_cached_tokens(self) -> int:
        return self.workload.num_prompt_tokens - self.num_uncached_tokens

    @property
    def num_late_tokens(self) -> int:
        """As `num_uncached_tokens`, of a prompt so long that only those shorter need be in time."""
        return max(1, self.workload.prompt_tokens_within(self.attainment) - self.workload.num_prefix_tokens)

    @property
    def num_final_tokens(self) -> int:
        return self.workload.num_prompt_tokens + self.workload.num_output_tokens

    @property
    def mean_keys(self) -> int:
        """That a decode token attends to, over the length of an answer."""
        return self.workload.num_prompt_tokens + self.workload.num_output_tokens // 2

    def model(self, placement: Placement) -> FittedModel:
        return known_model(placement, tables=self.tables)

    def placements(self) -> tuple[Placement, ...]:
        """Those within a node that hold at least one request. Estimates are left out where there are tables: they are
        of another kind, and the search would pick the kinder kind.

        Raises: `ConfigError` when there are none.
        """
        possible = [each for each in self._shardings() if each.kv_tokens >= self.workload.most_tokens]
        if not possible:
            raise ConfigError(
                f"{self.shape.name} with {self.workload.most_tokens} tokens does not fit into a node of "
                f"{self.hardware.num_in_node} {self.hardware.name}; plan for hardware with more memory"
            )
        tabulated = [each for each in possible if stored_profile(each, tables=self.tables) is not None]
        return tuple(tabulated or possible)

    def _shardings(self) -> list[Placement]:
        node = self.hardware.num_in_node
        sizes = [(tp, 1) for tp in TENSOR_PARALLEL_SIZES if tp <= node]
        if self.shape.num_experts > 1:
            sizes += [(tp, node // tp) for tp in TENSOR_PARALLEL_SIZES if tp < node]
        return [
            Placement(hardware=self.hardware, shape=self.shape, tensor_parallel_size=tp, data_parallel_size=dp)
            for tp, dp in sizes
        ]
