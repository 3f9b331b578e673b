"""The table of `pdserve verify-faults`: it has every fault of every process at every state that a handoff can be in."""

from pdserve.bench.faults.cases import (
    FAULTS_OF_LINKS,
    FAULTS_OF_PROCESSES,
    MOMENTS,
    Case,
    Fault,
    Promise,
    Provocation,
    Victim,
    link_cases,
    process_cases,
)
from pdserve.config.role import Role
from pdserve.transfer.handoff import ReceiverState, SenderState


def test_names_of_cases_are_different() -> None:
    names = [case.name for case in (*process_cases(), *link_cases())]
    assert len(set(names)) == len(names)


def test_moments_are_all_states_of_both_sides() -> None:
    for role, states in ((Role.PREFILL, SenderState), (Role.DECODE, ReceiverState)):
        assert {moment.state for moment in MOMENTS if moment.stops is role} == {state.value for state in states}


def test_every_process_suffers_every_fault_at_every_moment_unless_it_is_dead_then() -> None:
    missing = {(moment, victim, fault) for moment in MOMENTS for victim in Victim for fault in FAULTS_OF_PROCESSES} - {
        (case.moment, case.victim, case.fault) for case in process_cases()
    }
    killed = {Provocation.LOSE_DECODE: Victim.DECODE, Provocation.LOSE_PREFILL: Victim.PREFILL}
    assert missing == {
        (moment, killed[moment.provocation], fault)
        for moment in MOMENTS
        if moment.provocation in killed
        for fault in FAULTS_OF_PROCESSES
        if fault is not Fault.RESTART
    }


def test_links_are_cut_of_workers_alone() -> None:
    assert {case.fault for case in link_cases()} == set(FAULTS_OF_LINKS)
    assert {case.victim for case in link_cases()} == {Victim.PREFILL, Victim.DECODE}


def test_only_the_loss_of_the_gateway_or_of_the_last_decode_worker_may_be_seen_by_clients() -> None:
    for case in (*process_cases(), *link_cases()):
        may_be_seen = case.victim is Victim.GATEWAY or (case.is_last and case.victim is Victim.DECODE)
        assert may_be_seen or case.promise is Promise.SAME


def test_pause_within_the_lease_is_seen_by_nobody() -> None:
    for case in (*process_cases(), *link_cases()):
        if case.fault in (Fault.PAUSE, Fault.BLINK):
            assert case.promise is Promise.SAME


def test_case_says_in_its_name_who_is_struck_how_and_when() -> None:
    pushing = next(moment for moment in MOMENTS if moment.name == "pushing")
    case = Case(victim=Victim.DECODE, fault=Fault.KILL, moment=pushing)
    assert case.name == "decode-kill-pushing"
    assert Case(victim=Victim.DECODE, fault=Fault.KILL, moment=pushing, is_last=True).name == "last-decode-kill-pushing"
