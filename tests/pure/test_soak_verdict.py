"""The verdict of a soak: what grows, leaks or is wrong is found, and what only warms up is not."""

import random

import pytest

from pdserve.bench.soak.samples import IdleFigures, IdlePoint, LedgerHistory, Life
from pdserve.bench.soak.verdict import (
    RSS_GROWTH_BOUND,
    Counts,
    Growth,
    IdleGrowth,
    findings,
    idle_growths,
    leaks_in,
    memory_growths,
)
from pdserve.units import MIB

RUN_S = 1800.0
NUM_SAMPLES = 180
GOOD = Counts(requests=100, wrong=0, hung=0)
FLAT = Growth(name="gateway", pid=1, before_bytes=100.0, after_bytes=100.0)
STILL = IdleGrowth(name="gateway", pid=1, num_fds=0, num_threads=0, shared_bytes=0)


def life(
    *,
    warm_up_mib: float = 0.0,
    leaked_mib: float = 0.0,
    cache_mib: float = 0.0,
    start_s: float = 0.0,
    stop_s: float = RUN_S,
) -> Life:
    """100 MiB and some noise; warm-up comes in the first tenth, a leak and use of the cache evenly over the run."""
    noise = random.Random(7)
    found = Life(name="decode-0", pid=10)
    for index in range(NUM_SAMPLES):
        at_s = RUN_S * index / (NUM_SAMPLES - 1)
        if not start_s <= at_s <= stop_s:
            continue
        warm_mib = warm_up_mib * min(1.0, (at_s - start_s) / (RUN_S / 10))
        found.at_s.append(at_s)
        found.is_loaded.append(True)
        found.shared_rss_bytes.append(round(MIB * cache_mib * at_s / RUN_S))
        found.rss_bytes.append(
            found.shared_rss_bytes[-1]
            + round(MIB * (100 + warm_mib + leaked_mib * (at_s - start_s) / RUN_S + noise.uniform(-0.5, 0.5)))
        )
    return found


def share_of(lived: Life) -> float:
    (growth,) = memory_growths([lived], run_s=RUN_S)
    return growth.share


def test_memory_that_is_flat_after_its_warm_up_has_not_grown() -> None:
    assert abs(share_of(life(warm_up_mib=80.0))) < 0.01


def test_planted_leak_of_a_tenth_of_the_memory_is_found() -> None:
    """From the middle of the second quarter to that of the last half of it is gained: 12 of 100 MiB by 24."""
    growth = memory_growths([life(leaked_mib=24.0)], run_s=RUN_S)
    assert growth[0].share == pytest.approx(12 / 109, abs=0.01)
    assert any("decode-0 gained" in finding for finding in findings(GOOD, growth, [STILL], [], []))


def test_leak_within_the_bound_after_a_great_warm_up_is_no_finding() -> None:
    growth = memory_growths([life(warm_up_mib=50.0, leaked_mib=2.0)], run_s=RUN_S)
    assert 0 < growth[0].share < RSS_GROWTH_BOUND
    assert findings(GOOD, growth, [STILL], [], []) == []


def test_samples_without_load_are_no_part_of_the_trend() -> None:
    """Else a pause in the last quarter would hide what was gained, or seem to be a gain."""
    lived = life()
    for index in range(140, 170):
        lived.is_loaded[index] = False
        lived.rss_bytes[index] *= 3
    assert abs(share_of(lived)) < 0.01


def test_pages_of_the_cache_that_are_used_for_the_first_time_are_no_growth() -> None:
    assert abs(share_of(life(cache_mib=100.0))) < 0.01


def test_process_that_began_amid_the_run_or_ended_early_is_not_judged() -> None:
    lives = [life(), life(leaked_mib=500.0, start_s=RUN_S * 0.02), life(leaked_mib=500.0, stop_s=RUN_S * 0.4)]
    assert len(memory_growths(lives, run_s=RUN_S)) == 1
    assert len(memory_growths([life(stop_s=RUN_S * 0.6)], run_s=RUN_S)) == 1


def test_process_that_was_seen_once_is_not_judged() -> None:
    once = Life(name="x", pid=1, at_s=[1.0], is_loaded=[True], rss_bytes=[5], shared_rss_bytes=[0])
    assert memory_growths([once, Life(name="y", pid=2)], run_s=1.0) == []
    assert memory_growths([], run_s=1.0) == []


def points(*num_fds: int, pids: tuple[int, ...] | None = None) -> list[IdlePoint]:
    """As many threads as descriptors, less 10."""
    return [
        IdlePoint(
            at_s=float(index),
            processes={
                "gateway": IdleFigures(
                    pid=1 if pids is None else pids[index], num_fds=number, num_threads=number - 10, shared_bytes=10
                )
            },
            owned=(),
        )
        for index, number in enumerate(num_fds)
    ]


def test_descriptors_are_compared_with_the_most_of_the_first_half() -> None:
    (growth,) = idle_growths(points(20, 31, 20, 40, 31))
    assert (growth.num_fds, growth.num_threads, growth.shared_bytes) == (0, 0, 0)
    (growth,) = idle_growths(points(20, 23, 24, 26))
    assert growth.num_fds == 3
    assert findings(GOOD, [FLAT], [growth], [], []) == ["gateway has 3 more open descriptors when idle"]


def test_descriptor_and_thread_lost_with_each_of_many_requests_are_found() -> None:
    (growth,) = idle_growths(points(*range(20, 80, 10)))
    assert len(findings(GOOD, [FLAT], [growth], [], [])) == 2


def test_descriptors_of_another_life_are_not_compared() -> None:
    assert idle_growths(points(20, 23, 90, 95, pids=(1, 1, 2, 2))) == []


def test_leaks_and_what_is_owned_when_idle_are_told_once() -> None:
    histories = [LedgerHistory(name="decode-0", leaks=["pages: 3", "pages: 3"]), LedgerHistory(name="gateway")]
    kept = [IdlePoint(at_s=1.0, processes={}, owned=("prefill-0: h1 is pushing",))]
    assert leaks_in(histories, kept) == ["decode-0: pages: 3", "prefill-0: h1 is pushing"]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (Counts(requests=5, wrong=1, hung=0), "1 answers were wrong"),
        (Counts(requests=5, wrong=0, hung=2), "2 requests hung"),
        (Counts(requests=0, wrong=0, hung=0), "no request was sent"),
    ],
)
def test_run_with_bad_counts_does_not_pass(counts: Counts, words: str) -> None:
    (finding,) = findings(counts, [FLAT], [STILL], [], [])
    assert words in finding


def test_run_that_was_too_short_to_judge_does_not_pass() -> None:
    assert len(findings(GOOD, [], [STILL], [], [])) == len(findings(GOOD, [FLAT], [], [], [])) == 1
    assert findings(GOOD, [FLAT], [STILL], [], []) == []
    assert findings(GOOD, [FLAT], [STILL], ["a leak"], ["a problem"]) == ["a leak", "a problem"]
