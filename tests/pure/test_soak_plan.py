"""What a soak sends and breaks is settled by its seed, and is in reach of every part of it."""

import itertools
from collections import Counter
from random import Random

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.soak.fault_plan import Fault, FaultKind, Targets, choose_targets, fault_plan
from pdserve.bench.soak.mix import Manner, cases_of, draw, load_mix
from pdserve.config.role import Role

WORKERS = [
    ("prefill-0", Role.PREFILL),
    ("prefill-1", Role.PREFILL),
    ("decode-0", Role.DECODE),
    ("decode-1", Role.DECODE),
]
LEASE_S = 5.0
MIX = load_mix(
    Texts(
        short="A town lies by the sea.",
        medium="A hill.",
        long=NATURAL_TEXT.read_text(),
        short_ids=(5, 6),
        eos_id=0,
        word_id=260,
    )
)


def faults(seed: int, number: int = 300) -> list[Fault]:
    targets = choose_targets(WORKERS, gateway="gateway")
    return list(itertools.islice(fault_plan(targets, seed=seed, lease_s=LEASE_S, gap_s=(3.0, 15.0)), number))


def test_first_worker_of_each_role_lasts_where_there_is_another() -> None:
    assert choose_targets(WORKERS, gateway="gateway") == Targets(
        mortal=("prefill-1", "decode-1"), lasting=("prefill-0", "decode-0"), gateway="gateway"
    )
    assert choose_targets(WORKERS[1:3], gateway="gateway").mortal == ("prefill-1", "decode-0")


def test_faults_of_equal_seeds_are_equal_and_of_others_differ() -> None:
    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_faults_hit_everyone_but_end_neither_the_lasting_nor_the_gateway() -> None:
    hit = {(fault.kind, fault.target) for fault in faults(3)}
    ending = {FaultKind.KILL, FaultKind.DRAIN}
    assert {target for kind, target in hit if kind in ending} == {"prefill-1", "decode-1"}
    assert {target for kind, target in hit if kind is FaultKind.FREEZE} == {"gateway", *(name for name, _ in WORKERS)}
    assert {target for kind, target in hit if kind is FaultKind.LONG_FREEZE} == {name for name, _ in WORKERS}
    for fault in faults(3):
        assert (fault.lasts_s > LEASE_S) == (fault.kind is FaultKind.LONG_FREEZE)
        assert 3.0 <= fault.after_s <= 15.0


def test_mix_sends_every_kind_and_every_case_of_it() -> None:
    random = Random(4)
    drawn = [draw(MIX, random) for _ in range(3000)]
    by_kind = Counter(kind.name for kind, _ in drawn)
    total = sum(kind.weight for kind in MIX)
    for kind in MIX:
        assert 0.6 < by_kind[kind.name] / len(drawn) / (kind.weight / total) < 1.5
    assert {case.name for _, case in drawn} == {case.name for case in cases_of(MIX)}
    assert {kind.manner for kind in MIX} == set(Manner)


def test_cases_of_the_mix_have_names_of_their_own() -> None:
    """Recorded answers are found by them."""
    bodies: dict[str, object] = {}
    for kind in MIX:
        for case in kind.cases:
            assert bodies.setdefault(case.name, case.body) == case.body
