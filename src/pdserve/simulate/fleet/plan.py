"""What a fleet is made of."""

from dataclasses import dataclass, field

from pdserve.config.role import Role
from pdserve.config.worker import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_KV_TOKENS,
    DEFAULT_LEASE_S,
    DEFAULT_MAX_RUNNING,
    DEFAULT_MAX_WAITING,
    DEFAULT_PAGE_SLOTS,
    DEFAULT_SATURATION_TOKENS,
    HEARTBEATS_A_LEASE,
)
from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout
from pdserve.simulate.fleet.drafting import NO_DRAFTS, Drafting
from pdserve.units import NS_PER_US

SMOLLM2_LAYOUT = KvLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, page_slots=DEFAULT_PAGE_SLOTS, dtype="float32", num_planes=2
)
"""SmolLM2-135M, as `pdserve serve` runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Workers of one role, all alike. Figures are of one rank, as those of `WorkerSettings`.

    Raises: `ConfigError` when a number can't be.
    """

    num_workers: int
    num_ranks: int = 1
    """Data parallel ranks of each worker; 1 where it prefills for others."""
    kv_tokens: int = DEFAULT_KV_TOKENS
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Most tokens in a pass. For a colocated pool that prefills first, more than the longest prompt."""
    saturation_tokens: int = DEFAULT_SATURATION_TOKENS
    max_running: int = DEFAULT_MAX_RUNNING
    max_waiting: int = DEFAULT_MAX_WAITING

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_ranks", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a pool has at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Either colocated workers, or prefill and decode workers, or all three.

    Raises: `ConfigError` when nobody decodes, or a prefill worker has several data parallel ranks.
    """

    pools: dict[Role, PoolPlan] = field(default_factory=dict[Role, PoolPlan])
    layout: KvLayout = SMOLLM2_LAYOUT
    """Of the KV of one tensor parallel rank, which stands for all of its worker's: each pushes as many bytes over a NIC
    of its own."""
    tail_bytes: int = 2304
    max_pending: int = 1 << 20
    """Requests that the gateway takes at a time."""
    request_timeout_s: float = 600.0
    message_ns: int = 200 * NS_PER_US
    """How long a control message takes from process to process."""
    lease_s: float = DEFAULT_LEASE_S
    drafting: Drafting = NO_DRAFTS
    seed: int = 0
    """Of where each rank begins in the deviations of its performance model."""

    def __post_init__(self) -> None:
        if Role.DECODE not in self.pools and Role.BOTH not in self.pools:
            raise ConfigError("nobody decodes in this fleet; give it decode or colocated workers")
        prefill = self.pools.get(Role.PREFILL)
        if prefill is not None and prefill.num_ranks != 1:
            raise ConfigError(f"a prefill worker has 1 data parallel rank, not {prefill.num_ranks}; plan more workers")

    @property
    def num_workers(self) -> int:
        return sum(pool.num_workers for pool in self.pools.values())

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / HEARTBEATS_A_LEASE
