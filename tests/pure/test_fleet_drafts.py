"""Drafts in the simulator at fleet scale: the tokens that a pass gives with them, and what they cost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.fleet_loads import SWIFT, apart, poisson, pool, run, together

from pdserve.cli.main import main
from pdserve.config.role import Role
from pdserve.config.speculation import MAX_NUM_DRAFT_TOKENS
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation, PageIndex, SequenceId
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.port import PassShape
from pdserve.schedule.batch import Batch, Chunk
from pdserve.simulate.fleet.capacity import capacity_per_s
from pdserve.simulate.fleet.drafting import NO_DRAFTS, WRONG_TOKEN_ID, Drafting, RankDrafter
from pdserve.simulate.fleet.passes import result_of, shape_of
from pdserve.simulate.fleet.plan import FleetPlan
from pdserve.simulate.fleet.silence import TOKEN_ID
from pdserve.workload.request import WorkloadRequest

PASS_S = 0.01
STEADY = affine_model(provenance="a test", pass_s=PASS_S, token_s=0.0)
"""All passes take as long, whatever is in them."""

TWO_DRAFTS = Drafting(num_drafts=2, acceptance=0.7, drafter_layers=0.0, output_head_layers=0.0)


def one_busy_worker(drafting: Drafting, *, num_output_tokens: int = 3000) -> tuple[FleetPlan, list[WorkloadRequest]]:
    """With four requests that generate all the time."""
    load = [WorkloadRequest(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=num_output_tokens)] * 4
    return FleetPlan(pools={Role.BOTH: pool(1, kv_tokens=32_768)}, drafting=drafting, message_ns=0), load


@pytest.mark.parametrize(("num_drafts", "acceptance"), [(1, 0.8), (2, 0.7), (4, 0.5), (3, 1.0), (2, 0.0)])
def test_fleet_of_one_busy_worker_gets_the_tokens_a_pass_that_acceptance_promises(
    num_drafts: int, acceptance: float
) -> None:
    plan, load = one_busy_worker(replace(TWO_DRAFTS, num_drafts=num_drafts, acceptance=acceptance))
    tokens_per_pass = PASS_S / run(plan, load, STEADY).tpot_s
    expected = sum(acceptance**power for power in range(num_drafts + 1))
    assert float(tokens_per_pass.mean()) == pytest.approx(expected, rel=0.02)


def test_fleet_without_drafts_gets_a_token_a_pass() -> None:
    plan, load = one_busy_worker(NO_DRAFTS, num_output_tokens=50)
    assert run(plan, load, STEADY).tpot_s == pytest.approx([PASS_S] * 4)


@pytest.mark.parametrize("plan", [apart(2, 3), together(2, chunk_tokens=100)])
def test_drafts_that_are_never_right_and_cost_nothing_change_nothing(plan: FleetPlan) -> None:
    load = poisson(60, 40.0)
    free = affine_model(provenance="a test", pass_s=5e-3, token_s=0.0, push_s=1e-5, push_byte_s=1e-10)
    without = run(plan, load, free)
    never_right = run(replace(plan, drafting=replace(TWO_DRAFTS, acceptance=0.0)), load, free)
    for name in ("ttft_s", "tpot_s", "worst_gap_s", "e2e_s", "exposed_s"):
        np.testing.assert_array_equal(getattr(without, name), getattr(never_right, name), name)


@pytest.mark.parametrize("plan", [apart(1, 2), together(2, chunk_tokens=100)])
def test_fleet_with_drafts_answers_whole_and_the_same_twice(plan: FleetPlan) -> None:
    load = poisson(60, 20.0)
    plan = replace(plan, drafting=replace(TWO_DRAFTS, num_drafts=3))
    first, second = run(plan, load), run(plan, load)
    other = run(replace(plan, drafting=replace(plan.drafting, seed=1)), load)
    assert first.num_output_tokens.tolist() == [20] * 60
    assert first.e2e_s.tolist() == second.e2e_s.tolist()
    assert first.e2e_s.tolist() != other.e2e_s.tolist()


def test_drafting_takes_its_share_of_a_pass() -> None:
    """The default plan's model has 30 layers: each of two drafts takes the time of three."""
    costly = replace(TWO_DRAFTS, drafter_layers=2.0, output_head_layers=1.0)
    plan, load = one_busy_worker(TWO_DRAFTS, num_output_tokens=200)
    cheap_s, costly_s = run(plan, load, STEADY).tpot_s, run(replace(plan, drafting=costly), load, STEADY).tpot_s
    assert costly_s == pytest.approx(1.2 * cheap_s)
    assert costly.pass_s(STEADY, PassShape(num_decode_tokens=3), num_layers=30) == pytest.approx(1.2 * PASS_S)
    assert costly.pass_s(STEADY, PassShape(num_prefill_tokens=3), num_layers=30) == pytest.approx(32 / 30 * PASS_S)
    assert NO_DRAFTS.pass_s(STEADY, PassShape(num_prefill_tokens=3), num_layers=30) == PASS_S


def batch_of(*token_ids: int, num_drafts: int) -> Batch:
    chunk = Chunk(
        sequence_id=SequenceId(7),
        start=100,
        token_ids=token_ids,
        page_indices=(PageIndex(0),),
        samples=True,
        num_drafts=num_drafts,
    )
    return Batch(pass_index=0, chunks=(chunk,))


def test_decode_with_drafts_counts_as_decode_tokens_each_with_its_keys() -> None:
    assert shape_of(batch_of(TOKEN_ID, TOKEN_ID, WRONG_TOKEN_ID, num_drafts=2)) == PassShape(
        num_decode_tokens=3, num_decode_keys=101 + 102 + 103
    )
    assert shape_of(batch_of(TOKEN_ID, TOKEN_ID, num_drafts=0)) == PassShape(
        num_prefill_tokens=2, num_prefill_keys=101 + 102
    )


def test_result_has_the_drafts_that_were_right_and_a_token_more() -> None:
    def num_sampled(*drafts: int) -> int:
        batch = batch_of(TOKEN_ID, *drafts, num_drafts=len(drafts))
        return len(result_of(batch, drafter=None, started_ns=0, ended_ns=1).sampled[0][1])

    assert num_sampled() == 1
    assert num_sampled(TOKEN_ID, TOKEN_ID) == 3
    assert num_sampled(TOKEN_ID, WRONG_TOKEN_ID) == 2
    assert num_sampled(WRONG_TOKEN_ID, TOKEN_ID) == 1


@given(sequence_id=st.integers(0, 10**9).map(SequenceId), num_tokens=st.integers(1, 10**6))
def test_drafts_depend_on_where_they_are_and_on_nothing_before(sequence_id: SequenceId, num_tokens: int) -> None:
    used, fresh = (RankDrafter(TWO_DRAFTS, Incarnation(1), 0) for _ in range(2))
    used.drafts(SequenceId(3), 4)
    assert used.drafts(sequence_id, num_tokens) == fresh.drafts(sequence_id, num_tokens)
    assert len(fresh.drafts(sequence_id, num_tokens)) == 2


@pytest.mark.parametrize("seed", [-1, 10**30])
def test_drafts_may_have_any_seed(seed: int) -> None:
    drafter = RankDrafter(replace(TWO_DRAFTS, acceptance=1.0, seed=seed), Incarnation(1), 0)
    assert drafter.drafts(SequenceId(0), 1) == (TOKEN_ID, TOKEN_ID)


def test_drafts_of_ranks_sequences_and_lengths_are_drawn_apart() -> None:
    """No two of these rows are alike, and each has its share of right first drafts."""
    rows = [
        [
            RankDrafter(TWO_DRAFTS, Incarnation(incarnation), dp_rank).drafts(SequenceId(each), 9)[0]
            for each in range(500)
        ]
        for incarnation in (1, 2)
        for dp_rank in (0, 1)
    ]
    rows.append([RankDrafter(TWO_DRAFTS, Incarnation(1), 0).drafts(SequenceId(0), length)[0] for length in range(500)])
    assert len(set(map(tuple, rows))) == len(rows)
    for row in rows:
        assert row.count(TOKEN_ID) / 500 == pytest.approx(0.7, abs=0.07)


def test_capacity_counts_tokens_a_pass_and_no_drafts_that_do_not_fit_one() -> None:
    """Decoding bounds it: two sequences of 500 tokens fit the cache, and 64 tokens a pass."""
    plan = FleetPlan(pools={Role.BOTH: pool(1, kv_tokens=1000)})
    perf = dict.fromkeys(Role, STEADY)

    def token_s(drafting: Drafting, *, saturation_tokens: int = 64) -> float:
        pools = {Role.BOTH: replace(plan.pools[Role.BOTH], saturation_tokens=saturation_tokens)}
        drafted = replace(plan, pools=pools, drafting=drafting)
        return (1 / capacity_per_s(drafted, perf, num_prompt_tokens=400, num_output_tokens=100) - PASS_S) / 100

    assert token_s(NO_DRAFTS) == pytest.approx(PASS_S / 2)
    assert token_s(TWO_DRAFTS) == pytest.approx(PASS_S / 2 / (1 + 0.7 + 0.49))
    assert token_s(TWO_DRAFTS, saturation_tokens=4) == pytest.approx(PASS_S / 2 / 1.7)
    assert token_s(TWO_DRAFTS, saturation_tokens=1) == pytest.approx(PASS_S / 2)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_drafts": -1}, "drafts a pass are outside"),
        ({"num_drafts": MAX_NUM_DRAFT_TOKENS + 1}, "drafts a pass are outside"),
        ({"acceptance": 1.1}, "a probability of 1.1"),
        ({"acceptance": float("nan")}, "a probability of nan"),
        ({"drafter_layers": -1.0}, "-1 layers"),
        ({"output_head_layers": float("inf")}, "inf layers"),
    ],
)
def test_drafting_that_can_not_be_is_refused(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TWO_DRAFTS, **numbers)


def test_fleet_command_with_drafts_says_what_it_took_for_granted(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--workers", "4", "--requests", "30"]
    assert main([*command, "--speculate", "drafts=1,accept=0.8"]) == 0
    drafted = capsys.readouterr().out
    assert "1 draft a pass, each taken to be right 80% of the time" in drafted
    assert "1.80 tokens a decode pass" in drafted
    assert main(command) == 0
    assert "draft" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mtp", "'mtp' is no part of --speculate; it knows drafts, accept"),
        ("drafts=1,right=0.5", "'right=0.5' is no part"),
        ("drafts=1", "needs accept"),
        ("accept=0.5", "needs drafts"),
        ("drafts=1,accept=0.8,drafts=2", "has 'drafts' twice"),
        ("drafts=0,accept=0.8", "a whole number of 1 or more"),
        ("drafts=1.5,accept=0.8", "a whole number of 1 or more"),
        ("drafts=99,accept=0.8", "outside [0, 16]"),
        ("drafts=1,accept=80", "a probability of 0 to 1"),
        ("drafts=1,accept=nan", "a probability of 0 to 1"),
        ("drafts=1,accept=often", "a probability of 0 to 1"),
    ],
)
def test_fleet_command_refuses_drafts_that_make_no_sense_in_one_line(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--workers", "4", "--requests", "5", "--speculate", text]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_fleet_apart_with_drafts_has_more_tokens_a_second_for_a_user() -> None:
    load = poisson(60, 10.0, num_output_tokens=60)
    plan = apart(1, 2)
    without = run(plan, load, SWIFT)
    drafted = run(replace(plan, drafting=Drafting(num_drafts=1, acceptance=0.8)), load, SWIFT)
    assert np.median(drafted.tpot_s) < 0.7 * np.median(without.tpot_s)
    assert np.median(drafted.worst_gap_s) > np.median(without.worst_gap_s)
