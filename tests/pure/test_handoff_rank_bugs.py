"""Bugs planted in what goes on between ranks, tensor parallel and data parallel: worlds of the simulator find
each."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.pure.simulated_worlds import has_dp_ranks, has_ranks, require_found, require_found_when_calm

from pdserve.fabric.port import RegionDescriptor
from pdserve.ids import HandoffId
from pdserve.kv.shard import KvSharding
from pdserve.transfer.destination import exposures_of
from pdserve.transfer.outcome import Outcome
from pdserve.transfer.plan import RankPair, num_rank_pairs, num_writes, rank_pairs
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.peer import RankRegions

Pairs = tuple[RankPair, ...]
Change = Callable[[Pairs, KvSharding, KvSharding], Pairs]


def plant_pairs(monkeypatch: pytest.MonkeyPatch, change: Change, *, is_counted: bool) -> None:
    """Have the sender write changed pairs; `is_counted`: and the receiver count them, not the right ones."""

    def changed(source: KvSharding, target: KvSharding, *, handoff_id: HandoffId) -> Pairs:
        return change(rank_pairs(source, target, handoff_id=handoff_id), source, target)

    def count(source: KvSharding, target: KvSharding) -> int:
        return len(changed(source, target, handoff_id=HandoffId(1)))

    monkeypatch.setattr("pdserve.transfer.sender.rank_pairs", changed)
    if is_counted:
        monkeypatch.setattr("pdserve.transfer.plan.num_rank_pairs", count)


def without_the_last(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del source, target
    return pairs[:-1] if len(pairs) > 1 else pairs


def to_first_replicas(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del source
    return tuple(pair for pair in pairs if pair.target_rank % target.num_replicas == 0)


def from_another_head(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del target
    page_bytes = source.rank_layout.page_bytes
    return tuple(replace(pair, source_offset=(pair.source_offset + pair.run_bytes) % page_bytes) for pair in pairs)


def from_another_rank(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del target
    return tuple(replace(pair, source_rank=(pair.source_rank + 1) % source.num_ranks) for pair in pairs)


def to_another_head(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del source
    page_bytes = target.rank_layout.page_bytes
    return tuple(replace(pair, target_offset=(pair.target_offset + pair.run_bytes) % page_bytes) for pair in pairs)


def to_another_rank(pairs: Pairs, source: KvSharding, target: KvSharding) -> Pairs:
    del source
    return tuple(replace(pair, target_rank=(pair.target_rank + 1) % target.num_ranks) for pair in pairs)


@pytest.mark.parametrize("change", [without_the_last, to_first_replicas])
def test_ranks_that_nobody_writes_or_counts_are_found(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The request runs without the KV of a rank."""
    plant_pairs(monkeypatch, change, is_counted=True)
    require_found("H1", where=has_ranks)


@pytest.mark.parametrize("change", [without_the_last, to_first_replicas])
def test_ranks_that_are_counted_but_not_written_are_found(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The request never lands."""
    plant_pairs(monkeypatch, change, is_counted=False)
    require_found_when_calm("H7")


@pytest.mark.parametrize("change", [from_another_head, from_another_rank, to_another_head, to_another_rank])
def test_heads_that_go_astray_are_found(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    plant_pairs(monkeypatch, change, is_counted=False)
    require_found("H3", where=has_ranks)


def test_count_that_forgets_replicas_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(source: KvSharding, target: KvSharding) -> int:
        return num_rank_pairs(source, target) // target.num_replicas

    monkeypatch.setattr("pdserve.transfer.plan.num_rank_pairs", count)
    require_found("H1", "H2", where=has_ranks)


def test_count_by_our_sharding_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(source: KvSharding, target: KvSharding, **tokens: Any) -> int:
        del source
        return num_writes(target, target, **tokens)

    monkeypatch.setattr("pdserve.transfer.receiver.num_writes", count)
    require_found_when_calm("H1", "H2")


@pytest.mark.parametrize("arming", ["_arm_pages", "_arm_tail"])
def test_write_to_another_data_parallel_rank_is_found(monkeypatch: pytest.MonkeyPatch, arming: str) -> None:
    arm: Callable[..., None] = getattr(Sender, arming)

    def arm_elsewhere(self: Sender, handoff: Any, *arguments: Any, tick: int) -> None:
        own, targets = handoff.target, handoff.session.targets
        handoff.target = targets[(targets.index(own) + 1) % len(targets)]
        arm(self, handoff, *arguments, tick=tick)
        handoff.target = own

    monkeypatch.setattr(Sender, arming, arm_elsewhere)
    require_found("H2", "H3", where=has_dp_ranks)


def test_pages_given_back_to_another_data_parallel_rank_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Receiver._close

    def close_elsewhere(self: Receiver, handoff: Any, *, delivers: bool) -> None:
        own = handoff.dp_rank
        handoff.dp_rank = (own + 1) % len(self._destinations)
        close(self, handoff, delivers=delivers)
        handoff.dp_rank = own

    monkeypatch.setattr(Receiver, "_close", close_elsewhere)
    require_found("H2", "InternalError: page", "InternalError: tail slot", where=has_dp_ranks)


def test_outcome_given_to_another_data_parallel_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_outcomes = Receiver.take_outcomes

    def take_others(self: Receiver, dp_rank: int = 0) -> list[Outcome]:
        return take_outcomes(self, (dp_rank + 1) % len(self._destinations))

    monkeypatch.setattr(Receiver, "take_outcomes", take_others)
    require_found("H2", "H7", "InternalError: page", "InternalError: tail slot", where=has_dp_ranks)


def test_region_that_is_not_fenced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_first(regions: tuple[RankRegions, ...]) -> list[RegionDescriptor]:
        return exposures_of(regions)[1:]

    monkeypatch.setattr("pdserve.transfer.receiver.exposures_of", all_but_the_first)
    require_found("H2", "H7")
