"""Spans of traced requests, from what a worker's core reports."""

from collections.abc import Iterable

from pdserve.decode.request import Request
from pdserve.ids import RequestId
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.telemetry.instants import Instant
from pdserve.telemetry.trace import Span, TraceBook
from pdserve.transfer.pushed import PushedLayers
from pdserve.worker.rank_core import RankCore

QUEUE, PASSES, COMPUTE, PUSHES, LANDINGS = "queue", "passes", "compute", "pushes", "landings"
"""The tracks, as `docs/architecture.md` names them."""


def trace_pass(traces: TraceBook, core: RankCore, batch: Batch, result: BatchResult) -> None:
    """Call before the core completes the pass: its sequences are still known."""
    for chunk in batch.chunks:
        request_id = _traced_request(core, chunk)
        if request_id is None:
            continue
        name = (
            "decode"
            if chunk.samples and len(chunk.token_ids) == 1 + chunk.num_drafts
            else f"prefill [{chunk.start}, {chunk.stop})"
        )
        span = Span(
            track=PASSES,
            name=name,
            start_ns=result.started_ns,
            end_ns=result.ended_ns,
            num_tokens=len(chunk.token_ids),
        )
        traces.add(request_id, span)


def trace_pushes(traces: TraceBook, pushed: Iterable[PushedLayers]) -> None:
    """Layers as they were computed, and their writes from the first posted to the last completed.

    A drafter's layers come after the model's.
    """
    for push in pushed:
        request_id = push.grant.request_id
        for layer_index, layer in enumerate(push.layers):
            name = "tail" if push.is_tail else f"layer {push.first_layer + layer_index}"
            if layer.posted_ns == 0:
                continue
            traces.add(
                request_id,
                Span(track=COMPUTE, name=name, start_ns=layer.computed_ns, end_ns=layer.computed_ns),
            )
            traces.add(
                request_id,
                Span(
                    track=PUSHES,
                    name=name,
                    start_ns=layer.posted_ns,
                    end_ns=layer.completed_ns,
                    num_bytes=push.layer_bytes,
                ),
            )


def trace_request(traces: TraceBook, request: Request) -> None:
    """What the decode side knows of a request that ended: its waits, and the arrival of each write."""
    if not request.generate.traced:
        return
    times_ns = request.instants.times_ns
    waits = (
        ("wait for pages", Instant.ACCEPTED, Instant.GRANTED),
        ("handoff", Instant.GRANTED, Instant.LANDED),
        ("wait for a pass", Instant.LANDED, Instant.SCHEDULED),
    )
    for name, start, end in waits:
        if start in times_ns and end in times_ns:
            span = Span(track=QUEUE, name=name, start_ns=times_ns[start], end_ns=times_ns[end])
            traces.add(request.request_id, span)
    for arrival_ns in request.arrivals_ns:
        traces.add(request.request_id, Span(track=LANDINGS, name="landed", start_ns=arrival_ns, end_ns=arrival_ns))


def _traced_request(core: RankCore, chunk: Chunk) -> RequestId | None:
    grant = core.prefill.grant_of(chunk.sequence_id) if core.prefill is not None else None
    if grant is not None:
        return grant.request_id if grant.traced else None
    request = core.decode.request_of(chunk.sequence_id) if core.decode is not None else None
    return request.request_id if request is not None and request.generate.traced else None
