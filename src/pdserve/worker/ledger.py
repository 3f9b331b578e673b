"""Every page, tail slot, immediate and session of a worker, with owner, phase and age: `GET /debug/ledger`. Sans-IO."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from pdserve.ids import Incarnation, PageIndex
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.units import ns_to_seconds
from pdserve.worker.audit import Leak, audit
from pdserve.worker.core import WorkerCore
from pdserve.worker.holdings import Holding, holdings_of
from pdserve.worker.rank_core import RankCore

PageRanges = tuple[tuple[int, int], ...]
"""Half-open, ascending: `[[0, 3], [7, 8]]` are the pages 0, 1, 2 and 7."""


class OwnerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    owner: str
    phase: str
    """Of a request, a choice, a handoff, or a copy of a page."""
    place: str | None = None
    """Where in the schedule its sequence is."""
    age_s: float | None = None
    pages: PageRanges = ()
    """Its own; those with several owners are in `SharedPages`."""
    tail_slot: int | None = None
    immediate: int | None = None


class SharedPages(msgspec.Struct, frozen=True, kw_only=True):
    pages: PageRanges
    owners: tuple[str, ...]
    """Of each of these pages."""


class RankLedger(msgspec.Struct, frozen=True, kw_only=True):
    dp_rank: int
    num_pages: int
    num_free_pages: int
    owners: tuple[OwnerEntry, ...]
    shared: tuple[SharedPages, ...]


class SessionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that was given memory keys, or gave some."""

    peer: str
    incarnation: str
    """A string, for JSON readers that hold numbers in 53 bits."""
    phase: str
    age_s: float | None
    """Of the connection; None once it is gone."""
    num_handoffs: int


class LeakEntry(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    dp_rank: int | None
    message: str


class WorkerLedger(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    sessions: tuple[SessionEntry, ...]
    ranks: tuple[RankLedger, ...]
    leaks: tuple[LeakEntry, ...]
    """What nobody owns, or too many: empty unless there is a bug."""


def ledger_of(
    core: WorkerCore, *, now_ns: int, connected_since_ns: Mapping[Incarnation, int] = MappingProxyType({})
) -> WorkerLedger:
    """As things are now."""
    ages_s = {peer: ns_to_seconds(now_ns - since_ns) for peer, since_ns in connected_since_ns.items()}
    return WorkerLedger(
        worker_id=core.identity.worker_id,
        incarnation=str(core.identity.incarnation),
        sessions=tuple(_sessions(core.sender, core.receiver, ages_s)),
        ranks=tuple(_rank(core, rank, now_ns=now_ns) for rank in core.ranks),
        leaks=tuple(map(leak_entry, audit(core))),
    )


def leak_entry(leak: Leak) -> LeakEntry:
    return LeakEntry(kind=leak.kind.value, dp_rank=leak.dp_rank, message=leak.message)


def log_lines(ledger: WorkerLedger) -> Iterator[str]:
    """One an owner, a group of shared pages, a session and a leak; event name first."""
    for session in ledger.sessions:
        age = "" if session.age_s is None else f"age_s={session.age_s:.3f} "
        yield (
            f"ledger_session peer={session.peer} incarnation={session.incarnation} phase={session.phase} "
            f"{age}num_handoffs={session.num_handoffs}"
        )
    for rank in ledger.ranks:
        free = f"num_free_pages={rank.num_free_pages} num_pages={rank.num_pages}"
        yield f"ledger_rank dp_rank={rank.dp_rank} {free} num_owners={len(rank.owners)}"
        for entry in rank.owners:
            yield f"ledger_owner dp_rank={rank.dp_rank} {_fields(entry)}"
        for shared in rank.shared:
            yield f"ledger_shared dp_rank={rank.dp_rank} pages={_text(shared.pages)} owners={list(shared.owners)!r}"
    for leak in ledger.leaks:
        yield f"ledger_leak kind={leak.kind} dp_rank={leak.dp_rank} what={leak.message!r}"


def page_ranges(page_indices: Iterable[int]) -> PageRanges:
    """The fewest ranges of these pages."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(set(page_indices)):
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)


def _sessions(
    sender: Sender | None, receiver: Receiver | None, ages_s: Mapping[Incarnation, float]
) -> Iterator[SessionEntry]:
    """A lost peer stays in the receiver until it is fenced; a sender forgets it at once."""
    for side in (sender, receiver):
        for session in side.sessions if side is not None else ():
            is_connected = side is not None and side.is_connected(session.incarnation)
            yield SessionEntry(
                peer=session.worker_id,
                incarnation=str(session.incarnation),
                phase="connected" if is_connected else "fencing",
                age_s=ages_s.get(session.incarnation),
                num_handoffs=len(session.handoffs),
            )


def _rank(core: WorkerCore, rank: RankCore, *, now_ns: int) -> RankLedger:
    holdings = holdings_of(rank, sender=core.sender, receiver=core.receiver)
    owners_of: defaultdict[PageIndex, list[str]] = defaultdict(list)
    for holding in holdings:
        for page_index in holding.page_indices:
            owners_of[page_index].append(holding.owner)
    groups: defaultdict[tuple[str, ...], list[PageIndex]] = defaultdict(list)
    for page_index, owners in owners_of.items():
        if len(owners) > 1:
            groups[tuple(owners)].append(page_index)
    return RankLedger(
        dp_rank=rank.dp_rank,
        num_pages=rank.pool.num_pages,
        num_free_pages=rank.pool.num_free,
        owners=tuple(_entry(holding, owners_of, now_ns=now_ns) for holding in holdings),
        shared=tuple(SharedPages(pages=page_ranges(pages), owners=owners) for owners, pages in groups.items()),
    )


def _entry(holding: Holding, owners_of: dict[PageIndex, list[str]], *, now_ns: int) -> OwnerEntry:
    return OwnerEntry(
        owner=holding.owner,
        phase=holding.phase.value,
        place=None if holding.place is None else holding.place.value,
        age_s=None if holding.since_ns is None else ns_to_seconds(now_ns - holding.since_ns),
        pages=page_ranges(page for page in holding.page_indices if len(owners_of[page]) == 1),
        tail_slot=holding.tail_slot,
        immediate=holding.immediate,
    )


def _fields(entry: OwnerEntry) -> str:
    """Those that are there."""
    fields: list[str] = [f"owner={entry.owner!r}", f"phase={entry.phase}"]
    if entry.place is not None:
        fields.append(f"place={entry.place}")
    if entry.age_s is not None:
        fields.append(f"age_s={entry.age_s:.3f}")
    if entry.pages:
        fields.append(f"pages={_text(entry.pages)}")
    if entry.tail_slot is not None:
        fields.append(f"tail_slot={entry.tail_slot}")
    if entry.immediate is not None:
        fields.append(f"immediate={entry.immediate:#x}")
    return " ".join(fields)


def _text(ranges: Sequence[tuple[int, int]]) -> str:
    return ",".join(f"[{start},{stop})" for start, stop in ranges)
