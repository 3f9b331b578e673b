"""All that one worker decides, as a single object that takes events and the time.

A prefill worker has one rank; a decode worker has one or more data parallel ranks, which share the receiver, the fabric
and the connections. Sans-IO: the step loops, the connections and the clock are `process`'s.
"""

from collections.abc import Iterable

from pdserve.config.role import Role
from pdserve.decode.request import Request
from pdserve.errors import InternalError, RemoteProtocolError
from pdserve.fabric.port import ExpectationExpired, FabricEvent, Fenced, FlushEnded, Landed, PushEnded
from pdserve.ids import Incarnation, RequestId
from pdserve.kv.pages import PagePool
from pdserve.prefill.role import PrefillRole
from pdserve.transfer.destination import Destination
from pdserve.transfer.limits import ReceiverLimits
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.transfer.source import DraftSource, Source
from pdserve.wire.cluster import Failed, FailureKind, Generate, Load
from pdserve.wire.peer import Grant, Message
from pdserve.worker.rank_core import RankCore
from pdserve.worker.surroundings import Surroundings
from pdserve.worker.vocabulary import why_unknown, why_unknown_in


class WorkerCore:
    """Threads: one. A worker that prefills has a `sender`, one that decodes a `receiver`; the other is None."""

    def __init__(self, around: Surroundings) -> None:
        self.identity = around.identity
        self._vocab_size = around.engine.vocab_size
        pools = [PagePool(num_pages=around.engine.num_pages) for _ in around.regions]
        is_prefill = around.settings.role is Role.PREFILL
        self.sender = _sender(around) if is_prefill else None
        self.receiver = None if is_prefill else _receiver(around, pools)
        self.ranks = tuple(
            RankCore(around, dp_rank=dp_rank, pool=pool, sender=self.sender, receiver=self.receiver)
            for dp_rank, pool in enumerate(pools)
        )
        self.decodes = tuple(rank.decode for rank in self.ranks if rank.decode is not None)
        self.is_draining = False

    @property
    def prefill(self) -> PrefillRole | None:
        """Of a prefill worker: its one rank's."""
        return self.ranks[0].prefill

    @property
    def num_open(self) -> int:
        """Requests and handoffs that have not ended."""
        num_handoffs = self.prefill.num_open if self.prefill is not None else 0
        return sum(decode.num_open for decode in self.decodes) + num_handoffs

    def drain(self) -> None:
        """Refuse new requests and new grants from now on; what is here goes on to its end."""
        self.is_draining = True
        if self.prefill is not None:
            self.prefill.is_draining = True

    def on_generate(self, generate: Generate, *, now_ns: int) -> list[Message]:
        """Give a request to the rank it names; returns the refusal when there is no such rank, or the worker drains."""
        if not 0 <= generate.dp_rank < len(self.decodes):
            return [self._refusal(generate, FailureKind.INTERNAL, f"has no decoding rank {generate.dp_rank}")]
        unknown = why_unknown_in(generate, vocab_size=self._vocab_size)
        if unknown is not None:
            return [self._refusal(generate, FailureKind.INVALID, f"can't take it: {unknown}")]
        if self.is_draining:
            return [self._refusal(generate, FailureKind.SHUTTING_DOWN, "drains and will stop")]
        self.decodes[generate.dp_rank].on_generate(generate, now_ns=now_ns)
        return []

    def on_grant(self, peer: Incarnation, grant: Grant, *, now_ns: int) -> None:
        """Raises: `RemoteProtocolError` when it is malformed; the peer checked the same tokens before."""
        if self.prefill is None:
            return
        unknown = why_unknown(grant.token_ids, vocab_size=self._vocab_size, where="a grant")
        if unknown is not None:
            raise RemoteProtocolError(unknown, peer=str(peer))
        self.prefill.on_grant(peer, grant, now_ns=now_ns)

    def on_abort(self, request_id: RequestId, *, now_ns: int) -> None:
        for decode in self.decodes:
            decode.on_abort(request_id, now_ns=now_ns)

    def on_fabric_events(self, events: Iterable[FabricEvent], *, now_ns: int) -> None:
        for event in events:
            match event:
                case PushEnded() | FlushEnded():
                    if self.prefill is not None:
                        self.prefill.on_fabric_event(event, now_ns=now_ns)
                case Landed() | ExpectationExpired() | Fenced():
                    if self.receiver is not None:
                        self.receiver.on_fabric_event(event, now_ns=now_ns)
        self.advance(now_ns=now_ns)

    def advance(self, *, now_ns: int) -> None:
        """Let waiting requests use what the last event freed."""
        for decode in self.decodes:
            decode.advance(now_ns=now_ns)

    def on_time(self, now_ns: int) -> None:
        if self.receiver is not None:
            self.receiver.on_time(now_ns)
        for decode in self.decodes:
            decode.on_time(now_ns)

    def peer_lost(self, peer: Incarnation, *, now_ns: int) -> None:
        """A control connection ended; the peer may have been on either side."""
        if self.prefill is not None:
            self.prefill.peer_lost(peer, now_ns=now_ns)
        if self.receiver is not None:
            self.receiver.peer_lost(peer)
        self.advance(now_ns=now_ns)

    def abort_all(self, *, now_ns: int) -> None:
        """The gateway that owned every request is gone."""
        for decode in self.decodes:
            decode.abort_all(now_ns=now_ns)

    def fail_all(self, kind: FailureKind, message: str, *, now_ns: int) -> None:
        """End every request with the same failure: the worker stops."""
        for decode in self.decodes:
            decode.fail_all(kind, message, now_ns=now_ns)

    def take_messages(self) -> list[Message]:
        """What the decode roles have to tell the gateway."""
        return [message for decode in self.decodes for message in decode.take_messages()]

    def take_ended(self) -> list[Request]:
        """Requests of the decode roles that ended, however, since the last call."""
        return [request for decode in self.decodes for request in decode.take_ended()]

    def loads(self) -> tuple[Load, ...]:
        """By data parallel rank."""
        return tuple(rank.load() for rank in self.ranks)

    @property
    def num_prefill_peers(self) -> int:
        return self.receiver.num_peers if self.receiver is not None else 0

    def _refusal(self, generate: Generate, kind: FailureKind, what: str) -> Failed:
        return Failed(
            sender=self.identity.incarnation,
            request_id=generate.request_id,
            kind=kind,
            message=f"worker {self.identity.worker_id} {what}",
        )


def _sender(around: Surroundings) -> Sender:
    if len(around.regions) != 1:
        raise InternalError(f"a prefill worker has one rank, not {len(around.regions)}")
    (regions,) = around.regions
    return Sender(
        incarnation=around.identity.incarnation,
        source=Source(
            sharding=around.engine.sharding,
            num_pages=around.engine.num_pages,
            kv_regions=regions.kv,
            draft=_draft_source(around),
            tail_region=regions.tail,
            tail_slot_bytes=around.engine.tail_slot_bytes,
        ),
        fabric=around.fabric,
        outbox=around.outbox,
        drop_peer=around.drop_peer,
    )


def _draft_source(around: Surroundings) -> DraftSource | None:
    layout, region = around.engine.draft_layout, around.regions[0].draft_kv
    return None if layout is None or region is None else DraftSource(layout=layout, region=region)


def _receiver(around: Surroundings, pools: list[PagePool]) -> Receiver:
    limits = ReceiverLimits()
    destinations = [
        Destination(
            pool=pool,
            kv_regions=regions.kv,
            draft_kv_region=regions.draft_kv,
            tail_region=regions.tail,
            num_tail_slots=min(around.engine.num_tail_slots, limits.max_handoffs),
        )
        for pool, regions in zip(pools, around.regions, strict=True)
    ]
    return Receiver(
        incarnation=around.identity.incarnation,
        sharding=around.engine.sharding,
        draft_layout=around.engine.draft_layout,
        destinations=destinations,
        fabric=around.fabric,
        outbox=around.outbox,
        drop_peer=around.drop_peer,
        limits=limits,
    )
