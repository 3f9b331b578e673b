"""The fabric as the messenger sees it: regions, peers, writes with immediates, counted arrivals, terminal events.

Implemented by `pdserve.fabric.native` (libfabric) and `pdserve.fabric.memory` (in one process, with faults by seed).
One contract suite, `tests/contract/test_fabric.py`, runs on both.

Every method returns at once; what it starts ends in exactly one terminal event from `poll()`. Events are batched: wait
until `fileno()` is readable, then call `poll()` once.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdserve.ids import Immediate
from pdserve.shared_region import MemoryRegion, SharedRegion

FabricPeerId = NewType("FabricPeerId", int)
RegionId = NewType("RegionId", int)
RemoteRegionId = NewType("RemoteRegionId", int)
PushId = NewType("PushId", int)
FlushId = NewType("FlushId", int)

IMMEDIATE_SLOT_BITS = 20
IMMEDIATE_GENERATION_BITS = 12


class RegionSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stretch `[start, start + num_bytes)` of a region, at `base`, registered with each NIC of the region.

    `base` is 0 where the provider wants offsets.
    """

    start: int
    num_bytes: int
    base: int
    keys: tuple[int, ...]
    """By NIC, as in `RegionDescriptor.nics`."""


class RegionDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a peer needs to write into a region; sendable. Slices ascend and cover `[0, num_bytes)` without gaps."""

    num_bytes: int
    nics: tuple[int, ...]
    """Those of its owner's NICs that write to it, by their place in its owner's `address`; not empty, each once."""
    slices: tuple[RegionSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainGroup:
    """NICs that are near each other, driven by one thread; see `pdserve.fabric.topology`."""

    bind_hosts: tuple[str, ...]
    """One entry a NIC: its local address, for `tcp` and `verbs`, or the name of its device, for `efa` (empty: the first
    there is). `shm` has no NICs: one entry, ignored."""
    cpus: tuple[int, ...] = ()
    """Cores for the thread, of the NICs' NUMA node; empty: not pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePush:
    """Pages of one handoff in every layer: layer L is posted when the layer counter reaches `first_tick + L + 1`.

    Page i of layer L is one write of `run_bytes` with `immediate`, from
    `source_offset + L * source_layer_bytes + source_pages[i] * source_page_bytes` in the local region to
    `target_offset + L * target_layer_bytes + target_pages[i] * target_page_bytes` in the remote one.
    The offsets and `run_bytes` select a range of heads inside a page.

    Requires: equal lengths of `source_pages` and `target_pages` (uint32), every write inside both regions: checked when
    armed.
    """

    push_id: PushId
    peer_id: FabricPeerId
    source: RegionId
    target: RemoteRegionId
    immediate: Immediate
    source_pages: NDArray[np.uint32]
    target_pages: NDArray[np.uint32]
    num_layers: int
    run_bytes: int
    source_page_bytes: int
    target_page_bytes: int
    source_layer_bytes: int
    target_layer_bytes: int
    source_offset: int = 0
    target_offset: int = 0
    first_tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleWrite:
    """One write, posted when the layer counter reaches `tick` (0: at once). Ends like a push, as one layer."""

    push_id: PushId
    peer_id: FabricPeerId
    source: RegionId
    target: RemoteRegionId
    immediate: Immediate
    source_offset: int
    target_offset: int
    num_bytes: int
    tick: int = 0


class PushOutcome(Enum):
    DONE = "done"
    """Every write completed locally: the source may be reused. Says nothing of the target (FACTS 1.1)."""
    CANCELLED = "cancelled"
    """`cancel` came first; what had been posted has completed, nothing more will be posted."""
    FAILED = "failed"
    """At least one write failed; everything posted has ended, nothing more will be posted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Instants of one layer's push, `CLOCK_MONOTONIC`; 0 where it was not reached."""

    computed_ns: int
    """The rank ticked the layer counter."""
    posted_ns: int
    """The first write of the layer was handed to libfabric."""
    completed_ns: int
    """The last write of the layer completed locally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEnded:
    push_id: PushId
    outcome: PushOutcome
    errno: int
    layers: tuple[LayerTimes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushEnded:
    """`delivered`: everything posted to the peer before the flush is in its memory, or has failed."""

    flush_id: FlushId
    delivered: bool
    errno: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The expected number of writes under `immediate` is in our memory."""

    immediate: Immediate
    num_writes: int
    first_ns: int
    last_ns: int
    arrivals_ns: tuple[int, ...]
    """One instant a write, in order of arrival, when `expect` asked to record; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationExpired:
    """The deadline passed with `num_arrived` of `num_expected` writes; the counter stays until `forget`."""

    immediate: Immediate
    num_arrived: int
    num_expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """The exposure is closed and nothing written through it can still be in flight (rule H2)."""

    exposure: RegionDescriptor


FabricEvent = PushEnded | FlushEnded | Landed | ExpectationExpired | Fenced


class FabricStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the fabric was opened, except `num_in_flight` (now)."""

    bytes_posted: int
    bytes_posted_by_nic: tuple[int, ...]
    """By the place of the NIC in `address`; the sum is `bytes_posted`."""
    num_writes_posted: int
    num_writes_completed: int
    num_writes_failed: int
    num_in_flight: int
    num_immediates_received: int
    num_stale_immediates: int
    num_armed_pushes: int


class Fabric(Protocol):
    """All NICs of a worker, in domain groups: regions, peers and counters.

    A region belongs to one group, whose NICs read from it and are written through. A push is striped over the NICs of
    its source's group and of its target: write i goes over pair i modulo the number of pairs, which are as many as the
    side with more NICs has, NIC p of one side with NIC p (modulo its number) of the other. A `SingleWrite` goes over
    one pair, which its push id chooses. Immediates are counted over all NICs.

    Threads: call from one thread; the data plane runs elsewhere, on one thread a group.
    """

    @property
    def provider(self) -> str: ...

    @property
    def address(self) -> bytes:
        """What a peer passes to `connect`."""
        ...

    def watch(self, counter: SharedRegion) -> None:
        """Follow the layer counter in `counter` (see `pdserve.layer_counter`) in all groups; at most one a fabric."""
        ...

    def register(self, region: MemoryRegion, *, group_index: int = 0) -> RegionId:
        """Make a region readable as a source, with the NICs of one group.

        Lifetime: the region outlives the fabric. Raises: `FabricError`, also for a kind of memory that it can't reach.
        """
        ...

    def expose(self, region_id: RegionId) -> RegionDescriptor:
        """A new key under which one peer may write to the region; `fence` takes it back. Raises: `FabricError`."""
        ...

    def fence(self, exposure: RegionDescriptor) -> None:
        """Close an exposure; ends in `Fenced`."""
        ...

    def connect(self, address: bytes) -> FabricPeerId:
        """Name a peer to write to. Raises: `FabricError` when the address is malformed."""
        ...

    def disconnect(self, peer_id: FabricPeerId) -> None:
        """Forget a peer; what is armed or posted to it ends as cancelled or failed."""
        ...

    def attach(self, peer_id: FabricPeerId, descriptor: RegionDescriptor) -> RemoteRegionId:
        """Name a region of a peer. Raises: `FabricError` when the slices have gaps or overlap."""
        ...

    def arm(self, push: PagePush | SingleWrite) -> None:
        """Post as the layer counter rises; ends in `PushEnded`.

        When a write to a peer fails, over any pair of NICs, all pushes to it fail, until it is connected anew.
        Raises: `FabricError` when a write would leave either region or a NIC gives no way to the peer, `CapacityError`
        when too much is armed; nothing is armed then.
        """
        ...

    def cancel(self, push_id: PushId) -> None:
        """Post no more of a push. Its one `PushEnded` still comes, after what was posted has ended."""
        ...

    def flush(
        self, flush_id: FlushId, peer_id: FabricPeerId, targets: tuple[RemoteRegionId, ...], *, deadline_ns: int
    ) -> None:
        """Prove that what was posted to the peer was delivered; ends in one `FlushEnded`.

        Writes a delivery-complete zero word over every pair of NICs that a push to one of `targets` was armed for, to
        the last 8 bytes of a target, which its owner keeps free for this.
        Requires: `targets` are all regions of the peer written to, at least one.
        """
        ...

    def expect(self, immediate: Immediate, num_writes: int, *, deadline_ns: int, record_arrivals: bool = False) -> None:
        """Ends in `Landed` once `num_writes` came, or in `ExpectationExpired`. Those that came before the call count.

        Raises: `FabricError` when the immediate is expected already or its generation is closed, `CapacityError` when
        too many are.
        """
        ...

    def forget(self, immediate: Immediate) -> None:
        """Close the immediate's generation: later counts of it are dropped and counted as stale (rule H5)."""
        ...

    def poll(self) -> list[FabricEvent]:
        """The events since the last call."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something."""
        ...

    def stats(self) -> FabricStats: ...

    def close(self) -> None:
        """Cancel, drain with a deadline, free. No event comes after it."""
        ...
