"""The report of `pdserve bench-transfer` as tables for people."""

from pdserve.bench.transfer import Row
from pdserve.bench.transfer_planning import PlanningRow
from pdserve.bench.transfer_report import Report
from pdserve.bench.transfer_shardings import PushRow
from pdserve.units import KIB, MIB

_PAGES_HEAD = f"{'page':>9}  {'provider':<14} {'GB/s':>7}  {'limit':<18} {'GB/s':>7} {'ratio':>6} {'spread':>7}"
_PUSHES_HEAD = (
    f"{'ranks':<15} {'write':>8}  {'provider':<8} {'pages/s':>9} {'GB/s':>7}  {'limit':<18} {'GB/s':>7} {'ratio':>6} "
    f"{'spread':>7}"
)
_PLANNING_HEAD = (
    f"{'ranks':<15} {'writes':>10} {'first ms':>8} {'p50 ms':>7} {'spread':>7} {'max ms':>7} {'peak KiB':>9} "
    f"{'of first':>9}"
)


def format_report(report: Report) -> str:
    """A table a part, then what the figures mean and where they were measured."""
    configuration, machine = report.configuration, report.machine
    lines = [
        "Pages of one rank",
        _PAGES_HEAD,
        *map(_page_line, report.rows),
        *(f"{'':>9}  {peer.provider:<14} {peer.reason}" for peer in report.skipped),
        "",
        "Pushes of one layer, by prefill and decode ranks",
        _PUSHES_HEAD,
        *map(_push_line, report.pushes),
        "",
        _planning_title(report.planning[0]),
        _PLANNING_HEAD,
        *map(_planning_line, report.planning),
        "",
        f"{configuration.region_bytes // MIB} MiB in random pages, {configuration.num_rounds} times; medians of "
        f"{configuration.repetitions} repetitions, limit and contender in turn; spread is that of the ratio, or of p50",
        f"{machine.cpu}, {machine.num_cpus} CPUs, Linux {machine.kernel}, commit {report.commit or 'unknown'}",
    ]
    return "\n".join(lines)


def _page_line(row: Row) -> str:
    return (
        f"{row.page_bytes // KIB:>5} KiB  {row.provider:<14} {row.gb_per_s:>7.2f}  {row.limit:<18} "
        f"{row.limit_gb_per_s:>7.2f} {row.ratio:>6.2f} {row.spread:>7.0%}"
    )


def _push_line(row: PushRow) -> str:
    ranks = _ranks(row) + (f", {row.num_nics} NICs" if row.num_nics > 1 else "")
    return (
        f"{ranks:<15} {row.run_bytes // KIB:>4} KiB  {row.provider:<8} {row.pages_per_s:>9,.0f} {row.gb_per_s:>7.2f}  "
        f"{row.limit:<18} {row.limit_gb_per_s:>7.2f} {row.ratio:>6.2f} {row.spread:>7.0%}"
    )


def _planning_line(row: PlanningRow) -> str:
    return (
        f"{_ranks(row):<15} {row.num_writes:>10,} {row.first_chunk_ms:>8.2f} {row.chunk_ms_p50:>7.2f} "
        f"{row.spread:>7.0%} {row.chunk_ms_max:>7.2f} {row.peak_bytes // KIB:>9,} "
        f"{row.first_chunk_peak_bytes // KIB:>9,}"
    )


def _planning_title(row: PlanningRow) -> str:
    return (
        f"Planning {row.num_tokens:,} tokens, a chunk of {row.chunk_tokens:,} at a time: {row.num_pages:,} pages, "
        f"{row.num_layers} layers"
    )


def _ranks(row: PushRow | PlanningRow) -> str:
    return f"{row.cache} {row.source_ranks}-{row.target_ranks}"
