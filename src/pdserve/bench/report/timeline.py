"""One handoff as SVG: the layers computed above, the layers pushed below, and what has landed."""

from collections.abc import Sequence
from html import escape

from pdserve.bench.handoff_trace import HandoffTrace, figures, layer_spans
from pdserve.bench.report.chart import Axis, short
from pdserve.telemetry.trace import Span

WIDTH, LEFT, RIGHT, TOP = 1160, 110, 16, 44
LANE_HEIGHT, LANE_STEP, LANDED_HEIGHT = 34, 42, 70
MIN_BAR_WIDTH = 0.6
"""A push takes a fraction of a pixel, and must be seen."""

SHOWN_PAST_FIRST_TOKEN = 0.25
"""Of the time to the first token: some decode steps are enough."""


def handoff_timeline(trace: HandoffTrace) -> str:
    """A `figure`. Raises: `InternalError` when the request was not handed over."""
    summary = figures(trace)
    landings = [_ms(trace, span.start_ns) for span in trace.track("landings")]
    first_token_ms = _ms(trace, trace.first_token_ns)
    stop_ms = (1 + SHOWN_PAST_FIRST_TOKEN) * first_token_ms
    time = Axis(label="ms since the client sent the request", start=0.0, stop=stop_ms)
    lanes = [
        (name, [span for span in spans if _ms(trace, span.start_ns) < stop_ms], color)
        for name, spans, color in _lanes(trace)
    ]
    title = (
        f"One handoff of {summary.num_tokens} tokens: {summary.num_writes} writes, "
        f"{100 * summary.landed_before_end_share:.1f}% landed before the last forward pass ended, "
        f"{1e3 * summary.exposed_s:.1f} ms exposed"
    )
    landed_top = TOP + LANE_STEP * len(lanes)
    height = landed_top + LANDED_HEIGHT + 44
    parts = [
        f'<figure class="wide"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
        *_grid(time, bottom=height - 44),
        *(_lane(trace, time, row, name, spans, color) for row, (name, spans, color) in enumerate(lanes)),
        _landed(time, landings, top=landed_top),
        _first_token(time, first_token_ms, bottom=height - 44),
        "</svg></figure>",
    ]
    return "\n".join(parts)


def _lanes(trace: HandoffTrace) -> list[tuple[str, list[Span], int]]:
    passes = trace.track("passes")
    return [
        ("prefill passes", [span for span in passes if span.name.startswith("prefill")], 0),
        ("layers computed", layer_spans(trace), 0),
        ("layers pushed", [span for span in trace.track("pushes") if span.name != "tail"], 1),
        ("decode steps", [span for span in passes if span.name == "decode"], 2),
    ]


def _ms(trace: HandoffTrace, instant_ns: int) -> float:
    return (instant_ns - trace.start_ns) / 1e6


def _across(time: Axis, instant_ms: float) -> float:
    return LEFT + time.place(instant_ms) * (WIDTH - LEFT - RIGHT)


def _grid(time: Axis, *, bottom: int) -> list[str]:
    parts: list[str] = []
    for tick in time.ticks():
        place = _across(time, tick)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{short(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{bottom + 34}" text-anchor="middle">{time.label}</text>')
    return parts


def _lane(trace: HandoffTrace, time: Axis, row: int, name: str, spans: Sequence[Span], color: int) -> str:
    top = TOP + row * LANE_STEP
    bars: list[str] = []
    for span in spans:
        start, stop = _across(time, _ms(trace, span.start_ns)), _across(time, _ms(trace, span.end_ns))
        bars.append(
            f'<rect class="bar c{color}" x="{start:.1f}" y="{top}" width="{max(stop - start, MIN_BAR_WIDTH):.1f}" '
            f'height="{LANE_HEIGHT}"><title>{escape(_told(trace, span))}</title></rect>'
        )
    label = f'<text class="tick" x="{LEFT - 8}" y="{top + LANE_HEIGHT / 2 + 4}" text-anchor="end">{name}</text>'
    return label + "".join(bars)


def _told(trace: HandoffTrace, span: Span) -> str:
    """What the pointer over a bar shows."""
    length_ms = (span.end_ns - span.start_ns) / 1e6
    return f"{span.name}: at {_ms(trace, span.start_ns):.2f} ms for {length_ms:.3f} ms"


def _landed(time: Axis, landings: Sequence[float], *, top: int) -> str:
    bottom = top + LANDED_HEIGHT
    path = f"M{_across(time, 0):.1f} {bottom}"
    for index, landing in enumerate(landings, start=1):
        path += f"H{_across(time, landing):.1f}V{bottom - LANDED_HEIGHT * index / len(landings):.1f}"
    label = f'<text class="tick" x="{LEFT - 8}" y="{top + LANDED_HEIGHT / 2}" text-anchor="end">% landed</text>'
    return f'{label}<path class="line c3" d="{path}H{WIDTH - RIGHT}"/>'


def _first_token(time: Axis, instant_ms: float, *, bottom: int) -> str:
    place = _across(time, instant_ms)
    return (
        f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{place - 4:.1f}" y="{TOP - 2}" text-anchor="end">first token</text>'
    )
