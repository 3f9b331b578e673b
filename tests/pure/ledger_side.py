"""Ledgers of workers on a scripted fabric: read back, and held to what must be so of each."""

from dataclasses import dataclass, field

from tests.pure.decode_side import DECODE, PREFILL
from tests.pure.prefill_side import hello_of
from tests.pure.worker_side import WorkerSide

from pdserve.config.role import Role
from pdserve.fabric.port import PushOutcome
from pdserve.ids import HandoffId, Immediate, RequestId, TailSlot
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.units import NS_PER_S
from pdserve.wire.peer import Cancel, Grant
from pdserve.worker.ledger import OwnerEntry, RankLedger, ledger_of

NOW_NS = 3 * NS_PER_S
"""When the ledger is taken; everything else happens at 0."""


def rank_ledger(worker: WorkerSide, dp_rank: int = 0) -> RankLedger:
    """Of one data parallel rank. Every page is in it once, and nothing leaked."""
    ledger = ledger_of(worker.core, now_ns=NOW_NS)
    assert ledger.leaks == ()
    rank = ledger.ranks[dp_rank]
    groups = [entry.pages for entry in rank.owners] + [shared.pages for shared in rank.shared]
    pages = [page for ranges in groups for start, stop in ranges for page in range(start, stop)]
    assert len(pages) == len(set(pages)) == rank.num_pages - rank.num_free_pages
    return rank


def owners(worker: WorkerSide, dp_rank: int = 0) -> dict[str, OwnerEntry]:
    rank = rank_ledger(worker, dp_rank)
    assert len({entry.owner for entry in rank.owners}) == len(rank.owners)
    return {entry.owner: entry for entry in rank.owners}


def num_pages(entry: OwnerEntry) -> int:
    return sum(stop - start for start, stop in entry.pages)


def start_pass(worker: WorkerSide) -> Batch:
    batch = worker.core.ranks[0].next_batch(now_ns=0)
    assert batch is not None
    return batch


def end_pass(worker: WorkerSide, batch: Batch) -> None:
    sampled = tuple((chunk.sequence_id, (0,)) for chunk in batch.chunks if chunk.samples)
    result = BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=0, ended_ns=0)
    worker.core.ranks[0].complete(batch, result, now_ns=0)


@dataclass(slots=True)
class Granting:
    """A prefill worker and its one peer, which grants."""

    worker: WorkerSide = field(default_factory=lambda: WorkerSide(role=Role.PREFILL, num_dp_ranks=1, num_pages=20))

    def __post_init__(self) -> None:
        assert self.worker.core.sender is not None
        self.worker.core.sender.peer_joined(hello_of(PREFILL, sharding=self.worker.sharding))

    def grants(self, *, num_tokens: int) -> None:
        self.worker.core.on_grant(PREFILL, self.grant(num_tokens=num_tokens), now_ns=0)

    def grant(self, *, num_tokens: int) -> Grant:
        return Grant(
            sender=PREFILL,
            receiver=DECODE,
            handoff_id=HandoffId(7),
            request_id=RequestId("request"),
            dp_rank=0,
            token_ids=tuple(range(num_tokens)),
            num_held_tokens=0,
            page_indices=tuple(range((num_tokens + 2) // 4)),
            immediate=Immediate(1 << 12),
            tail_slot=TailSlot(3),
            timeout_s=30.0,
        )

    def cancels(self) -> None:
        assert self.worker.core.prefill is not None
        message = Cancel(sender=PREFILL, receiver=DECODE, handoff_id=HandoffId(7))
        self.worker.core.prefill.on_cancel(PREFILL, message, now_ns=0)

    def pushes_end(self, outcome: PushOutcome = PushOutcome.DONE) -> None:
        fabric = self.worker.fabric
        events = [fabric.push_ends(push_id, outcome) for push_id in list(fabric.armed)]
        self.worker.core.on_fabric_events(events, now_ns=0)

    @property
    def entry(self) -> OwnerEntry:
        """Of the only handoff."""
        (entry,) = owners(self.worker).values()
        assert entry.owner == f"handoff 7 of request request to decode-{PREFILL}"
        assert (entry.age_s, entry.tail_slot) == (3.0, 0)
        return entry
