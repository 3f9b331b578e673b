"""A worker's driver: what it counts and traces of drafts, over an engine that guesses all right; how it drains."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import pytest
from tests.pure.prefill_side import ONE_RANK, hello_of
from tests.pure.worker_side import WorkerSide, generate_of

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.config.speculation import Drafter, Speculation
from pdserve.engine.port import Engine, EngineInfo
from pdserve.ids import Incarnation, RequestId, SequenceId
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.shared_region import MemoryRegion, SharedRegion
from pdserve.telemetry.trace import TraceBook
from pdserve.telemetry.worker_metrics import WorkerMetrics
from pdserve.wire.cluster import FinishReason, Generated
from pdserve.wire.peer import Message
from pdserve.worker.driver import Driver

PERIOD = (0, 1, 2)
"""The prompt and its answer repeat these tokens, so that n-grams guess well."""


class PeriodicEngine:
    """Samples the token that goes on with the period."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.tail_region = SharedRegion.create(name="tail", num_bytes=64)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=64)
        self.kv_regions: tuple[MemoryRegion, ...] = ()
        self.draft_kv_region: MemoryRegion | None = None
        self.num_drafts = 0

    async def run(self, batch: Batch) -> BatchResult:
        await asyncio.sleep(0)
        self.num_drafts += sum(chunk.num_drafts for chunk in batch.chunks)
        sampled = tuple((SequenceId(chunk.sequence_id), sampled_of(chunk)) for chunk in batch.chunks if chunk.samples)
        return BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=1, ended_ns=2)

    async def wait_failed(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def close(self) -> None:
        self.tail_region.close()
        self.counter_region.close()


def sampled_of(chunk: Chunk) -> tuple[int, ...]:
    first = chunk.stop - chunk.num_drafts
    expected = tuple(PERIOD[position % len(PERIOD)] for position in range(first, chunk.stop + 1))
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    assert drafts == expected[:-1]
    return expected


def driver_of(
    side: WorkerSide,
    engines: Sequence[Engine] = (),
    *,
    metrics: WorkerMetrics | None = None,
    traces: TraceBook | None = None,
) -> Driver:
    return Driver(
        core=side.core,
        engines=engines,
        fabric=side.fabric,
        clock=VirtualClock(1),
        metrics=metrics or WorkerMetrics(model_name="toy"),
        traces=traces or TraceBook(),
    )


@pytest.mark.parametrize("speculation", [None, Speculation(drafter=Drafter.NGRAM)])
async def test_drafts_of_each_pass_are_counted_by_rank(speculation: Speculation | None) -> None:
    side = WorkerSide(role=Role.BOTH, num_dp_ranks=1, speculation=speculation)
    engine = PeriodicEngine(side.engine_info)
    metrics, traces = WorkerMetrics(model_name="toy"), TraceBook()
    driver = driver_of(side, [engine], metrics=metrics, traces=traces)
    finished: asyncio.Queue[FinishReason] = asyncio.Queue()
    token_ids: list[int] = []

    def to_gateway(message: Message) -> None:
        assert isinstance(message, Generated)
        for delta in message.deltas:
            token_ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                finished.put_nowait(delta.finish_reason)

    driver.to_gateway = to_gateway
    passes = asyncio.create_task(driver.run_passes(0))
    driver.on_generate(generate_of(PERIOD * 3, max_tokens=12, is_remote=False, traced=True))
    assert await asyncio.wait_for(finished.get(), 5.0) is FinishReason.LENGTH
    passes.cancel()
    with suppress(asyncio.CancelledError):
        await passes
    await engine.close()
    assert token_ids == list(PERIOD * 4)
    assert (engine.num_drafts > 0) == (speculation is not None)
    counted = [counted_as(metrics, f'pdserve:draft_tokens{which}_total{{dp_rank="0"}}') for which in ("", "_accepted")]
    assert counted == [engine.num_drafts] * 2
    names = [span.name for span in traces.get(RequestId("request")) if span.track == "passes"]
    assert names == ["prefill [0, 9)"] + ["decode"] * (len(names) - 1)


def counted_as(metrics: WorkerMetrics, name: str) -> float:
    (line,) = [line for line in metrics.exposition().decode().splitlines() if line.startswith(name)]
    return float(line.split()[-1])


# Draining


async def test_driver_with_nothing_open_has_drained_at_once_and_has_news_for_the_gateway() -> None:
    driver = driver_of(WorkerSide())
    async with asyncio.timeout(0):
        await driver.drain()
    assert driver.core.is_draining
    assert driver.status_changed.is_set()


async def test_driver_drains_until_the_last_request_has_ended() -> None:
    side = WorkerSide()
    driver = driver_of(side)
    side.generate("first", dp_rank=0, is_remote=False)
    side.generate("second", dp_rank=1)
    draining = asyncio.create_task(driver.drain())
    for name in ("first", "second"):
        await asyncio.sleep(0)
        assert not draining.done()
        with driver.event() as now_ns:
            driver.core.on_abort(RequestId(name), now_ns=now_ns)
    await asyncio.wait_for(draining, 5.0)


async def test_driver_of_a_prefill_worker_drains_until_delivery_is_proved() -> None:
    side = WorkerSide(role=Role.PREFILL, num_dp_ranks=1)
    driver, sender = driver_of(side), side.core.sender
    assert sender is not None
    sender.peer_joined(hello_of(Incarnation(7), sharding=ONE_RANK))
    draining = asyncio.create_task(driver.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    (flush_id,) = side.fabric.flushes
    side.fabric.unread.append(side.fabric.flush_ends(flush_id))
    driver.on_fabric_readable()
    await asyncio.wait_for(draining, 5.0)


async def test_driver_counts_what_has_landed_before_a_peer_counts_as_lost() -> None:
    """The prefill worker drained and left; that all has landed waits unread at the fabric."""
    side = WorkerSide()
    driver = driver_of(side)
    side.generate("request", dp_rank=0)
    (grant,) = side.grants()
    side.fabric.unread.append(side.fabric.all_land(grant.immediate))
    driver.peer_lost(grant.receiver)
    assert side.prefilled == [(0, "request")]
    assert driver.core.loads()[0].num_quarantined_pages == 0
