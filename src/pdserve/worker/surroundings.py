"""What the core of a worker is given: what it is, what it computes with, and the ports through which it acts."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.engine.port import EngineInfo
from pdserve.fabric.port import Fabric, RegionId
from pdserve.ids import Incarnation, PageIndex
from pdserve.schedule.limits import ScheduleLimits
from pdserve.text.tokenizer import Tokenizer
from pdserve.transfer.identity import Identity, Outbox


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegions:
    """The regions of one engine, registered."""

    kv: tuple[RegionId, ...]
    """By tensor parallel rank."""
    draft_kv: RegionId | None = None
    """Of rank 0, where the engine has a drafter with a cache."""
    tail: RegionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    settings: WorkerSettings
    identity: Identity
    engine: EngineInfo
    """Of each data parallel rank: they are alike."""
    regions: tuple[EngineRegions, ...]
    """By data parallel rank."""
    tokenizer: Tokenizer
    fabric: Fabric
    outbox: Outbox
    drop_peer: Callable[[Incarnation, str], None]
    """Closes the control connection to a peer and logs why; `peer_lost` follows."""
    on_prefilled: Callable[[int, Request, tuple[PageIndex, ...]], None] | None = None
    """Sees the data parallel rank, and the pages of each prompt when they are whole: for verification."""

    @property
    def schedule_limits(self) -> ScheduleLimits:
        settings = self.settings
        return ScheduleLimits(
            max_batch_tokens=settings.chunk_tokens,
            saturation_tokens=settings.saturation_tokens,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            ageing_tokens_per_s=settings.ageing_tokens_per_s,
        )
