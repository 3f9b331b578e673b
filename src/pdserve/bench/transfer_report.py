"""Everything that `pdserve bench-transfer` measures, as one document."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pdserve.bench.provenance import Machine, this_commit, this_machine
from pdserve.bench.transfer import Comparison, Configuration, Contender, PageRun, Row, Skipped
from pdserve.bench.transfer_fabric import PROVIDERS, measure_pages
from pdserve.bench.transfer_planning import PlanningRow, measure_planning
from pdserve.bench.transfer_programs import installed_peers, limit_measures
from pdserve.bench.transfer_shardings import PushRow, measure_pushes
from pdserve.units import KIB


class Report(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[Row, ...]
    """Pages of one rank, by size."""
    pushes: tuple[PushRow, ...]
    """One layer from the ranks of one sharding to those of another."""
    planning: tuple[PlanningRow, ...]
    """What the prefill side's Python takes for a chunk's writes."""
    skipped: tuple[Skipped, ...]
    configuration: Configuration
    machine: Machine
    commit: str | None


def measure_report(configuration: Configuration, *, on_run: Callable[[str], None]) -> Report:
    """Raises: `ConfigError` when the limits were not built; what our own contenders raise. Peers may fail."""
    peers, absent = installed_peers()
    comparison = Comparison(limits=limit_measures(), repetitions=configuration.repetitions, on_run=on_run)
    rows = _measure_pages(configuration, comparison, [*_page_contenders(), *peers])
    pushes = measure_pushes(comparison, region_bytes=configuration.region_bytes, num_rounds=configuration.num_rounds)
    return Report(
        rows=tuple(rows),
        pushes=tuple(pushes),
        planning=tuple(measure_planning(repetitions=configuration.repetitions, on_run=on_run)),
        skipped=(*absent, *comparison.failures.values()),
        configuration=configuration,
        machine=this_machine(),
        commit=this_commit(),
    )


def _page_contenders() -> list[Contender]:
    return [
        Contender(provider=provider, limit=limit, measure=partial(measure_pages, provider))
        for provider, limit in PROVIDERS.items()
    ]


def _measure_pages(configuration: Configuration, comparison: Comparison, contenders: Sequence[Contender]) -> list[Row]:
    rows: list[Row] = []
    for page_bytes in configuration.page_bytes:
        run = PageRun(
            page_bytes=page_bytes, region_bytes=configuration.region_bytes, num_rounds=configuration.num_rounds
        )
        rows += comparison.measure(contenders, run, subject=f"{page_bytes // KIB} KiB")
    return rows
