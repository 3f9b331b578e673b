"""A trace of one handoff drawn for people: layers computed above, layers pushed below, and what has landed."""

# matplotlib's own annotations are partly unknown.
# pyright: reportUnknownMemberType=false

from pathlib import Path

import matplotlib

from pdserve.bench.handoff_trace import HandoffTrace, figures, layer_spans
from pdserve.telemetry.trace import Span

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COMPUTE_COLOR, PUSH_COLOR, DECODE_COLOR, LANDED_COLOR = "#4c72b0", "#dd8452", "#55a868", "#8172b3"


def draw(trace: HandoffTrace, out: Path) -> None:
    """A PNG of 1,500 x 750 pixels. Raises: `InternalError` when the request was not handed over."""
    summary = figures(trace)
    figure, (lanes, landed) = plt.subplots(
        2, 1, figsize=(15, 7.5), dpi=100, sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    _draw_lanes(lanes, trace)
    _draw_landed(landed, trace)
    lanes.set_title(
        f"One handoff of {summary.num_tokens} tokens: {summary.num_writes} writes, "
        f"{100 * summary.landed_before_end_share:.1f}% landed before the last forward pass ended, "
        f"{1e3 * summary.exposed_s:.1f} ms exposed"
    )
    landed.set_xlabel("ms since the client sent the request")
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def _draw_lanes(axes: Axes, trace: HandoffTrace) -> None:
    decodes = [span for span in trace.track("passes") if span.name == "decode"]
    prefills = [span for span in trace.track("passes") if span.name.startswith("prefill")]
    lanes = (
        ("prefill passes", prefills, COMPUTE_COLOR),
        ("layers computed", layer_spans(trace), COMPUTE_COLOR),
        ("layers pushed", [span for span in trace.track("pushes") if span.name != "tail"], PUSH_COLOR),
        ("decode steps", decodes, DECODE_COLOR),
    )
    for row, (_, spans, color) in enumerate(lanes):
        bars = [_bar(span, trace) for span in spans]
        # A push takes a fraction of a pixel: its own edge keeps it visible.
        edge = color if color == PUSH_COLOR else "white"
        axes.broken_barh(bars, (len(lanes) - row - 0.9, 0.8), facecolors=color, edgecolor=edge, linewidth=0.8)
    for prefill in prefills:
        start_ms, duration_ms = _bar(prefill, trace)
        axes.text(start_ms + duration_ms / 2, len(lanes) - 0.5, prefill.name, ha="center", va="center", color="white")
    axes.set_yticks([len(lanes) - row - 0.5 for row in range(len(lanes))], [name for name, _, _ in lanes])
    first_token_ms = (trace.first_token_ns - trace.start_ns) / 1e6
    axes.axvline(first_token_ms, color="black", linestyle="--", linewidth=1)
    axes.text(first_token_ms, len(lanes), " first token", va="top")


def _draw_landed(axes: Axes, trace: HandoffTrace) -> None:
    landings_ms = [(span.start_ns - trace.start_ns) / 1e6 for span in trace.track("landings")]
    shares = [100 * (index + 1) / len(landings_ms) for index in range(len(landings_ms))]
    axes.step(landings_ms, shares, where="post", color=LANDED_COLOR)
    axes.fill_between(landings_ms, shares, step="post", alpha=0.3, color=LANDED_COLOR)
    axes.set_ylabel("% landed")
    axes.set_ylim(0, 105)


def _bar(span: Span, trace: HandoffTrace) -> tuple[float, float]:
    return (span.start_ns - trace.start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
