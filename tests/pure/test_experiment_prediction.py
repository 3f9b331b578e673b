"""What the simulator says of the experiment, held against a book whose runs it made itself."""

import msgspec
import pytest
from tests.pure.test_experiment_book import empty_book, record

from pdserve.bench.experiment.book import Book, Felt, RunRecord
from pdserve.bench.experiment.points import POINTS, Arm
from pdserve.bench.experiment.prediction import fleet_plan, is_right, misordered, prediction_table, predictions
from pdserve.config.role import Role
from pdserve.perfmodel.fitted import FittedModel, affine_model
from pdserve.simulate.fleet.simulation import simulate_fleet

POINT = POINTS[0]
NUM_REQUESTS = 30


def perf(*, slower: float = 1.0) -> FittedModel:
    return affine_model(
        provenance="made up",
        pass_s=0.01 * slower,
        token_s=0.001 * slower,
        decode_token_s=0.0005 * slower,
        push_s=1e-4,
        push_byte_s=1e-9,
    )


def simulated_record(arm: Arm, *, seed: int, slower: float = 1.0) -> RunRecord:
    """As if the workers were exactly as the model says."""
    book = empty_book()
    workload = POINT.workload(prefill_s=book.reference.prefill_s[POINT.num_prompt_tokens], seed=seed)
    result = simulate_fleet(
        fleet_plan(arm, seed=seed), workload.requests(NUM_REQUESTS), dict.fromkeys(Role, perf(slower=slower))
    )
    felt = tuple(
        Felt(ttft_s=ttft_s, tpot_s=tpot_s, worst_gap_s=gap_s, complete=True)
        for ttft_s, tpot_s, gap_s in zip(
            result.ttft_s.tolist(), result.tpot_s.tolist(), result.worst_gap_s.tolist(), strict=True
        )
    )
    ttft_s = book.slo.ttft_prefills * book.reference.prefill_s[POINT.num_prompt_tokens]
    attainment = result.attainment(ttft_s=ttft_s, tpot_s=book.slo.tpot_s, worst_gap_s=book.slo.stall_s)
    blank = record(arm, seed=seed)
    return msgspec.structs.replace(
        blank, felt=felt, summary=msgspec.structs.replace(blank.summary, attainment=attainment)
    )


def book_with(*records: RunRecord) -> Book:
    return msgspec.structs.replace(empty_book(), records=records)


@pytest.fixture(scope="module")
def true_book() -> Book:
    return book_with(*(simulated_record(arm, seed=seed) for seed in range(2) for arm in Arm))


def test_runs_of_the_model_itself_are_predicted_exactly(true_book: Book) -> None:
    found = predictions(true_book, POINTS, perf())
    assert [prediction.arm for prediction in found] == list(Arm)
    assert [prediction.num_runs for prediction in found] == [2, 2, 2]
    assert all(comparison.error == 0 for prediction in found for comparison in prediction.comparisons)
    assert is_right(found)
    assert prediction_table(found).endswith("prediction: ok near=30 of=30 misordered=0")


def test_model_that_is_a_third_too_slow_is_found_off(true_book: Book) -> None:
    found = predictions(true_book, [POINT], perf(slower=4 / 3))
    assert not is_right(found)
    assert "prediction: failed" in prediction_table(found)


def test_arms_in_another_order_than_they_came_out_are_named() -> None:
    swapped = book_with(simulated_record(Arm.WHOLE, seed=0, slower=3), simulated_record(Arm.APART, seed=0))
    lines = misordered(predictions(swapped, [POINT], perf()))
    assert f"{POINT.name}: ttft_s p50 of A against B" in lines


def test_void_runs_are_not_predicted(true_book: Book) -> None:
    counted = true_book.records[0]
    void = msgspec.structs.replace(counted, conditions=msgspec.structs.replace(counted.conditions, steal_share=0.5))
    assert predictions(book_with(void), POINTS, perf()) == []
