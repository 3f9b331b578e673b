"""One request's way through the workers, from the spans they kept: a Chrome trace, and the figures that matter."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from pdserve.bench.api_client import Answer, ApiClient
from pdserve.errors import InternalError
from pdserve.telemetry.trace import Span
from pdserve.wire.bearer import bearer_headers

TRACKS = ("queue", "passes", "compute", "pushes", "landings")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTrace:
    """Spans by worker. Instants of workers on one machine compare; those of several machines do not."""

    request_id: str
    spans: dict[str, tuple[Span, ...]]
    start_ns: int
    """When the client sent the request."""
    first_token_ns: int

    def track(self, name: str) -> list[Span]:
        """The spans of one track over all workers, by start."""
        found = [span for spans in self.spans.values() for span in spans if span.track == name]
        return sorted(found, key=lambda span: span.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFigures:
    """What a trace shows of the overlap of compute and transfer."""

    num_tokens: int
    num_writes: int
    prefill_s: float
    """From the start of the first prefill pass to the end of the last."""
    exposed_s: float
    """From the end of the last prefill pass to the decode pass that the request joined: on an idle pair, the time to
    land what was left, to hear of it, and to schedule."""
    landed_before_end_share: float
    """Of the writes (all of one size but the tail), those that had landed when the last prefill pass ended."""
    num_layer_pushes: int
    num_pushed_before_end: int
    """Layer pushes posted before the pass that computed them had ended."""

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.prefill_s


async def collect(
    client: ApiClient, session: aiohttp.ClientSession, answer: Answer, *, secret: str | None
) -> HandoffTrace:
    """Ask every worker for its spans of a traced request.

    Requires: a token came. Raises: `InternalError` when no worker has any.
    """
    request_id = answer.answer_id
    headers = bearer_headers(secret)
    spans: dict[str, tuple[Span, ...]] = {}
    for worker in await client.workers():
        async with session.get(f"{worker['url']}/debug/trace/{request_id}", headers=headers) as response:
            response.raise_for_status()
            found = msgspec.json.decode(await response.read(), type=tuple[Span, ...])
        if found:
            spans[worker["worker_id"]] = found
    if not spans:
        raise InternalError(f"no worker kept a trace of {request_id}")
    return HandoffTrace(request_id=request_id, spans=spans, start_ns=answer.sent_ns, first_token_ns=answer.token_ns[0])


def figures(trace: HandoffTrace) -> HandoffFigures:
    """Raises: `InternalError` when the request was not handed over."""
    prefills = [span for span in trace.track("passes") if span.name.startswith("prefill")]
    landings = [span.start_ns for span in trace.track("landings")]
    joined_ns = max((span.end_ns for span in trace.track("queue") if span.name == "wait for a pass"), default=0)
    if not prefills or not landings:
        raise InternalError(f"{trace.request_id} was prefilled locally: there is no handoff to see")
    end_ns = max(span.end_ns for span in prefills)
    pushes = [span for span in trace.track("pushes") if span.name != "tail"]
    pass_ends = sorted(span.end_ns for span in prefills)
    return HandoffFigures(
        num_tokens=sum(span.num_tokens for span in prefills),
        num_writes=len(landings),
        prefill_s=(end_ns - prefills[0].start_ns) / 1e9,
        exposed_s=max(0, joined_ns - end_ns) / 1e9,
        landed_before_end_share=sum(landing_ns <= end_ns for landing_ns in landings) / len(landings),
        num_layer_pushes=len(pushes),
        num_pushed_before_end=sum(any(push.start_ns < end for end in pass_ends) for push in pushes),
    )


def layer_spans(trace: HandoffTrace) -> list[Span]:
    """Each layer's compute, from the tick of the layer before (or the start of its pass) to its own tick."""
    passes = [span for span in trace.track("passes") if span.name.startswith("prefill")]
    spans: list[Span] = []
    for prefill in passes:
        previous_ns = prefill.start_ns
        for tick in trace.track("compute"):
            if tick.name != "tail" and prefill.start_ns < tick.end_ns <= prefill.end_ns:
                spans.append(Span(track="compute", name=tick.name, start_ns=previous_ns, end_ns=tick.end_ns))
                previous_ns = tick.end_ns
    return spans


def chrome_trace(trace: HandoffTrace) -> dict[str, Any]:
    """The trace in the JSON format of chrome://tracing and ui.perfetto.dev: a process a worker, a thread a track."""
    events: list[dict[str, Any]] = []
    layers = layer_spans(trace)
    for process_id, (worker_id, spans) in enumerate(sorted(trace.spans.items()), start=1):
        events.append(_name("process_name", worker_id, process_id, 0))
        shown = [span for span in spans if span.track != "compute"]
        if any(span.track == "compute" for span in spans):
            shown += layers
        for thread_id, track in enumerate(TRACKS, start=1):
            on_track = [span for span in shown if span.track == track]
            if on_track:
                events.append(_name("thread_name", track, process_id, thread_id))
            events += [_event(span, trace.start_ns, process_id, thread_id) for span in on_track]
    first_token = Span(track="client", name="first token", start_ns=trace.start_ns, end_ns=trace.first_token_ns)
    events += [_name("process_name", "client", 0, 0), _event(first_token, trace.start_ns, 0, 1)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"request_id": trace.request_id}}


def _name(kind: str, name: str, process_id: int, thread_id: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process_id, "tid": thread_id, "args": {"name": name}}


def _event(span: Span, start_ns: int, process_id: int, thread_id: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": span.name,
        "cat": span.track,
        "ts": (span.start_ns - start_ns) / 1e3,
        "pid": process_id,
        "tid": thread_id,
    }
    arguments = {"num_tokens": span.num_tokens, "num_bytes": span.num_bytes}
    event["args"] = {name: value for name, value in arguments.items() if value}
    if span.end_ns == span.start_ns:
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": (span.end_ns - span.start_ns) / 1e3}
