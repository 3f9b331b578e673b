"""What a run comes to, in a few lines for a terminal."""

import textwrap
from collections import Counter
from collections.abc import Iterator

from pdserve.bench.load.capacity import ATTAINMENT_AIM, Capacity
from pdserve.bench.load.result import Distribution, LoadResult

NUM_ERRORS_SHOWN = 3
MAX_ERROR_LENGTH = 200


def summary_lines(result: LoadResult) -> list[str]:
    summary = result.summary
    latencies: list[tuple[str, Distribution | None]] = [
        ("TTFT", summary.ttft),
        ("TPOT of a request", summary.tpot),
        ("ITL", summary.itl),
        ("longest gap", summary.worst_gap),
        ("end to end", summary.e2e),
        ("lateness", summary.lateness),
    ]
    lines = [f"{'seconds':18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'samples':>10}"]
    lines += [_row(name, found) for name, found in latencies if found is not None]
    lines.append(
        f"requests {summary.num_requests}: completed {summary.num_completed}, refused {summary.num_refused}, failed "
        f"{summary.num_failed}; {summary.requests_per_s:.3g} requests/s and {summary.output_tokens_per_s:.4g} tokens/s "
        f"over {summary.duration_s:.1f} s"
    )
    if summary.attainment is not None and summary.goodput_per_s is not None:
        lines.append(f"objective met by {100 * summary.attainment:.1f}%: {summary.goodput_per_s:.3g} good requests/s")
    return [*lines, *_surroundings(result), *_errors(result)]


def capacity_lines(capacity: Capacity) -> list[str]:
    aim = f"{100 * ATTAINMENT_AIM:.0f}% of the requests met the objective"
    if capacity.rate_per_s is None:
        return [f"capacity: at no rate tried {aim}"]
    over = "" if capacity.too_much_per_s is None else f", and at {capacity.too_much_per_s:.3g} not"
    return [f"capacity: {capacity.rate_per_s:.3g} requests/s, the largest rate tried at which {aim}{over}"]


def _row(name: str, found: Distribution) -> str:
    values = (found.mean, found.p50, found.p90, found.p99, found.max)
    return f"{name:18}" + "".join(f"{value:10.4f}" for value in values) + f"{found.num_samples:10}"


def _surroundings(result: LoadResult) -> Iterator[str]:
    if result.pools:
        yield "busy: " + ", ".join(f"{role} {100 * share:.0f}%" for role, share in result.pools.items())
    if result.handoff:
        yield (
            f"handoffs traced {result.handoff['num_traced']:.0f}: exposed {1e3 * result.handoff['exposed_s_p50']:.2f} "
            f"ms in the median, {100 * result.handoff['hidden_share_mean']:.1f}% of the KV bytes hidden"
        )
    disturbance = result.disturbance
    shares = {"steal": disturbance.steal_share, "CPU pressure": disturbance.psi_cpu_share}
    known = [f"{name} {100 * share:.1f}%" for name, share in shares.items() if share is not None]
    if known:
        yield "machine: " + ", ".join(known)


def _errors(result: LoadResult) -> Iterator[str]:
    """The most frequent ones, each on one line: a proxy's error can be a page of HTML."""
    counts = Counter(" ".join(request.error.split()) for request in result.requests if request.error is not None)
    for error, count in counts.most_common(NUM_ERRORS_SHOWN):
        yield f"{count} failed: {textwrap.shorten(error, MAX_ERROR_LENGTH)}"
