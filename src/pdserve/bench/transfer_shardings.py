"""Pushes of one layer between ranks: sharded alike, put together, split and replicated, GQA and MLA."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from pdserve.bench.transfer import Comparison, Contender, PageRun, Row
from pdserve.bench.transfer_fabric import PROVIDERS, PushRun, measure_push_run
from pdserve.errors import ConfigError
from pdserve.ids import HandoffId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.plan import num_rank_pairs, rank_pairs

ONE_NIC = ("127.0.0.1",)
TWO_NICS = ("127.0.0.1", "127.0.0.2")
"""Both are the loopback interface: two connections, not two links."""

GQA_LAYER = KvLayout(num_layers=1, num_kv_heads=3, head_dim=64, page_slots=16, dtype="float32")
"""One layer of SmolLM2: 24 KiB a page."""
MLA_LAYER = KvLayout(num_layers=1, num_kv_heads=1, head_dim=576, page_slots=16, dtype="bfloat16", num_planes=1)
"""One layer of DeepSeek-V3: 18 KiB a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One layer of a cache, over `num_source_ranks` on the prefill side and `num_target_ranks` on the decode side."""

    name: str
    layout: KvLayout
    num_source_ranks: int
    num_target_ranks: int
    bind_hosts: tuple[str, ...] = ONE_NIC
    providers: Sequence[str] = tuple(PROVIDERS)

    @property
    def source(self) -> KvSharding:
        return KvSharding(layout=self.layout, num_ranks=self.num_source_ranks)

    @property
    def target(self) -> KvSharding:
        return KvSharding(layout=self.layout, num_ranks=self.num_target_ranks)

    @property
    def writes_per_page(self) -> int:
        return num_rank_pairs(self.source, self.target)

    @property
    def run_bytes(self) -> int:
        """Of each write; the same in all pairs of these scenarios."""
        (run_bytes,) = {pair.run_bytes for pair in rank_pairs(self.source, self.target, handoff_id=HandoffId(0))}
        return run_bytes

    def measure(self, provider: str, run: PageRun) -> float:
        """GB/s of as many writes as the limit moves pages, or a few less. Raises: as `measure_push_run`."""
        return measure_push_run(
            PushRun(
                provider=provider,
                bind_hosts=self.bind_hosts,
                source=self.source,
                target=self.target,
                num_pages=run.num_pages // self.writes_per_page,
                num_rounds=run.num_rounds,
            )
        )


SCENARIOS = (
    Scenario(name="GQA", layout=GQA_LAYER, num_source_ranks=1, num_target_ranks=1),
    Scenario(name="GQA", layout=GQA_LAYER, num_source_ranks=3, num_target_ranks=3),
    Scenario(name="GQA", layout=GQA_LAYER, num_source_ranks=3, num_target_ranks=1),
    Scenario(name="GQA", layout=GQA_LAYER, num_source_ranks=1, num_target_ranks=3),
    Scenario(name="MLA", layout=MLA_LAYER, num_source_ranks=4, num_target_ranks=4),
    Scenario(name="MLA", layout=MLA_LAYER, num_source_ranks=4, num_target_ranks=1),
    # Shared memory has no NICs.
    Scenario(
        name="GQA", layout=GQA_LAYER, num_source_ranks=3, num_target_ranks=3, bind_hosts=TWO_NICS, providers=("tcp",)
    ),
)


class PushRow(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario on one provider; speeds and spread as in `Row`."""

    cache: str
    source_ranks: int
    target_ranks: int
    num_nics: int
    provider: str
    run_bytes: int
    """Of each write; the limit moves pages of this size."""
    writes_per_page: int
    pages_per_s: float
    """Whole pages: a page counts once, however many ranks hold a part or a copy of it."""
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    ratio: float
    spread: float


def measure_pushes(comparison: Comparison, *, region_bytes: int, num_rounds: int) -> Iterator[PushRow]:
    """Raises: `ConfigError` when `region_bytes` are too few; what `measure_push_run` raises."""
    for scenario in SCENARIOS:
        run = PageRun(page_bytes=scenario.run_bytes, region_bytes=region_bytes, num_rounds=num_rounds)
        if run.num_pages < scenario.writes_per_page:
            raise ConfigError(f"--region: smaller than the {scenario.writes_per_page} writes of a page")
        contenders = [
            Contender(provider=provider, limit=PROVIDERS[provider], measure=partial(scenario.measure, provider))
            for provider in scenario.providers
        ]
        subject = f"{scenario.name} {scenario.num_source_ranks}-{scenario.num_target_ranks}"
        for row in comparison.measure(contenders, run, subject=subject):
            yield _push_row(scenario, row)


def _push_row(scenario: Scenario, row: Row) -> PushRow:
    return PushRow(
        cache=scenario.name,
        source_ranks=scenario.num_source_ranks,
        target_ranks=scenario.num_target_ranks,
        num_nics=len(scenario.bind_hosts),
        provider=row.provider,
        run_bytes=row.page_bytes,
        writes_per_page=scenario.writes_per_page,
        pages_per_s=row.gb_per_s * 1e9 / (scenario.writes_per_page * scenario.run_bytes),
        gb_per_s=row.gb_per_s,
        limit=row.limit,
        limit_gb_per_s=row.limit_gb_per_s,
        ratio=row.ratio,
        spread=row.spread,
    )
