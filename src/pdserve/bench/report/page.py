"""`report.html`: one file that needs nothing else, for light and dark screens."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pdserve.bench.handoff_trace import HandoffTrace
from pdserve.bench.load.capacity import ATTAINMENT_AIM
from pdserve.bench.load.result import Distribution, Disturbance, LoadResult
from pdserve.bench.report.charts import charts
from pdserve.bench.report.timeline import handoff_timeline
from pdserve.units import GIB
from pdserve.workload.objective import Objective

STYLE = Path(__file__).with_name("page.css")

DISTURBED_SHARE = 0.1
"""Of the time, stolen by the hypervisor or waited for a CPU, from which latencies say more about the machine."""


def write_report(result: LoadResult, path: Path, *, trace: HandoffTrace | None = None) -> None:
    """Write the page. Raises: `OSError`; `InternalError` when the traced request was not handed over."""
    path.write_text(page(result, trace=trace), encoding="utf-8")


def page(result: LoadResult, *, trace: HandoffTrace | None = None) -> str:
    drawn = [chart for chart in charts(result) if chart]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Load report</title>',
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head><body>",
        "<h1>Load report</h1>",
        f'<p class="faint">{escape(_origin(result))}</p>',
        _verdict(result),
        _warning(result.disturbance),
        f'<div class="side"><div><h2>Latencies</h2>{_latencies(result)}</div>',
        f"<div><h2>Requests</h2>{_table(('', 'value'), _totals(result))}</div></div>",
        f'<h2>Plots</h2><div class="charts">{"".join(drawn)}</div>',
        "" if trace is None else f"<h2>One handoff</h2>{handoff_timeline(trace)}",
        _shares("Busy share of each pool", result.pools),
        _shares("Handoffs", result.handoff),
        "<h2>Configuration</h2>",
        _settings(result.configuration),
        "<h2>Machine</h2>",
        _settings(_machine(result)),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _origin(result: LoadResult) -> str:
    return f"{result.started}, commit {result.commit or 'unknown'}, {result.summary.duration_s:.1f} s"


def _verdict(result: LoadResult) -> str:
    summary, told = result.summary, _told(result.objective)
    if summary.attainment is None or not told:
        return '<p class="verdict">No objective was given: nothing to judge.</p>'
    holds = summary.attainment >= ATTAINMENT_AIM
    rate = "" if summary.goodput_per_s is None else f", {summary.goodput_per_s:.3g} good requests a second"
    return (
        f'<p class="verdict {"good" if holds else "bad"}">{"Objective met" if holds else "Objective missed"}: '
        f"{100 * summary.attainment:.1f}% of requests had {told} (aim: {100 * ATTAINMENT_AIM:.0f}%){rate}.</p>"
    )


def _told(objective: Objective) -> str:
    limits = (("TTFT", objective.ttft_s), ("mean TPOT", objective.tpot_s), ("every gap", objective.stall_s))
    return ", ".join(f"{name} at most {limit_s:g} s" for name, limit_s in limits if limit_s is not None)


def _warning(disturbance: Disturbance) -> str:
    shares = {"stolen by the hypervisor": disturbance.steal_share, "with a task waiting": disturbance.psi_cpu_share}
    known = {name: share for name, share in shares.items() if share is not None}
    if sum(known.values()) <= DISTURBED_SHARE:
        return ""
    told = ", ".join(f"{100 * share:.0f}% of CPU time {name}" for name, share in known.items())
    return (
        f'<p class="warning">Disturbed: {told}. Something else used this machine, or the load generator shares cores '
        "with the server: compare ratios within this run only, or measure again.</p>"
    )


def _latencies(result: LoadResult) -> str:
    summary = result.summary
    rows: list[tuple[str, Distribution | None]] = [
        ("TTFT", summary.ttft),
        ("TPOT, mean of a request", summary.tpot),
        ("ITL, every gap", summary.itl),
        ("longest gap of a request", summary.worst_gap),
        ("end to end", summary.e2e),
        ("lateness of the generator", summary.lateness),
    ]
    cells = [(name, *_cells(found)) for name, found in rows if found is not None]
    return _table(("", "mean", "p50", "p90", "p99", "max", "samples"), cells)


def _cells(found: Distribution) -> list[str]:
    values = (found.mean, found.p50, found.p90, found.p99, found.max)
    return [*(_seconds(value_s) for value_s in values), str(found.num_samples)]


def _seconds(value_s: float) -> str:
    return f"{1e3 * value_s:.3g} ms" if abs(value_s) < 1 else f"{value_s:.2f} s"


def _totals(result: LoadResult) -> list[tuple[str, ...]]:
    summary = result.summary
    rows = [
        ("sent", str(summary.num_requests)),
        ("completed", str(summary.num_completed)),
        ("refused (429, 503)", str(summary.num_refused)),
        ("failed", str(summary.num_failed)),
        ("requests a second", f"{summary.requests_per_s:.3g}"),
        ("output tokens a second", f"{summary.output_tokens_per_s:.4g}"),
    ]
    if summary.attainment is not None:
        rows.append(("met the objective", f"{100 * summary.attainment:.1f}%"))
    if summary.goodput_per_s is not None:
        rows.append(("goodput, requests a second", f"{summary.goodput_per_s:.3g}"))
    return rows


def _machine(result: LoadResult) -> dict[str, str]:
    machine, disturbance = result.machine, result.disturbance
    shares = (
        ("busy", disturbance.busy_share),
        ("stolen", disturbance.steal_share),
        ("CPU pressure (PSI, some)", disturbance.psi_cpu_share),
    )
    generator_s = disturbance.generator_cpu_s
    return {
        "CPU": machine.cpu,
        "cores": str(machine.num_cpus),
        "memory": f"{machine.memory_bytes / GIB:.1f} GiB",
        "kernel": machine.kernel,
        "Python": machine.python,
        **{name: "unknown" if share is None else f"{100 * share:.1f}%" for name, share in shares},
        "CPU time of the load generator": "unknown" if generator_s is None else f"{generator_s:.1f} s",
    }


def _shares(title: str, values: dict[str, float]) -> str:
    """A section; nothing where the server told nothing."""
    if not values:
        return ""
    return f"<h2>{title}</h2>" + _table(("", "value"), [(name, f"{value:.4g}") for name, value in values.items()])


def _settings(values: dict[str, str]) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="text">{escape(value)}</td></tr>' for name, value in values.items()
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
