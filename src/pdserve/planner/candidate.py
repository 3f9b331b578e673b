"""A fleet that might do."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.config.role import Role
from pdserve.kv.layout import DTYPE_BYTES, KvLayout
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.port import PerfModel
from pdserve.planner.goal import Goal
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan

PAGE_SLOTS = 64
KV_DTYPE = "bfloat16"
MAX_RUNNING = 1024
"""Memory is what bounds a decode batch, not this, and not a pass's tokens."""
MAX_WAITING = 1 << 16
"""Nothing is refused: a plan that can't keep up is to show it as waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    role: Role
    placement: Placement
    num_workers: int
    chunk_tokens: int

    @property
    def num_accelerators(self) -> int:
        return self.num_workers * self.placement.num_accelerators

    def __str__(self) -> str:
        placement = self.placement
        name = "colocated" if self.role is Role.BOTH else self.role.value
        dp = f" DP{placement.data_parallel_size}" if placement.data_parallel_size > 1 else ""
        chunk = f", chunks of {self.chunk_tokens}" if self.role is not Role.DECODE else ""
        return f"{self.num_workers} {name} (TP{placement.tensor_parallel_size}{dp}{chunk})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One colocated pool, or a prefill and a decode pool."""

    pools: tuple[Pool, ...]

    @property
    def is_colocated(self) -> bool:
        return len(self.pools) == 1

    @property
    def num_accelerators(self) -> int:
        return sum(pool.num_accelerators for pool in self.pools)

    def fleet_plan(self, drafting: Drafting = NO_DRAFTS) -> FleetPlan:
        return FleetPlan(
            pools={pool.role: _pool_plan(pool) for pool in self.pools},
            layout=_rank_layout(self.pools[0].placement),
            drafting=drafting,
        )

    def models(self, goal: Goal) -> Mapping[Role, PerfModel]:
        return {pool.role: goal.model(pool.placement) for pool in self.pools}

    def __str__(self) -> str:
        return " + ".join(map(str, self.pools))


def _pool_plan(pool: Pool) -> PoolPlan:
    return PoolPlan(
        num_workers=pool.num_workers,
        num_ranks=pool.placement.data_parallel_size,
        kv_tokens=pool.placement.kv_tokens,
        chunk_tokens=pool.chunk_tokens,
        saturation_tokens=pool.chunk_tokens,
        max_running=min(MAX_RUNNING, pool.chunk_tokens - 1),
        max_waiting=MAX_WAITING,
    )


def _rank_layout(placement: Placement) -> KvLayout:
    """As many bytes a token as the rank holds; how they are cut into heads costs no time."""
    shape = placement.shape
    layer_bytes = shape.kv_rank_token_bytes(placement.tensor_parallel_size) // shape.num_layers
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=1,
        head_dim=layer_bytes // DTYPE_BYTES[KV_DTYPE],
        page_slots=PAGE_SLOTS,
        dtype=KV_DTYPE,
        num_planes=1,
    )
