"""Which points a profile measures, and how its table reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.profile import Timings
from pdserve.bench.profile_points import KV_TOKENS_PER_PROMPT_TOKEN, PassPoint, pass_points, push_pages
from pdserve.cli.profile_table import format_accuracy, format_profile, format_timings
from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import NUM_FOLDS, Accuracy
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.profile import Profile, Source
from pdserve.perfmodel.sample import PassKind, PassSample, PushSample, chunk_shape, decode_shape


@given(max_prompt_tokens=st.integers(64, 8192), max_batch=st.integers(4, 128))
def test_points_of_each_kind_are_enough_to_hold_some_out(max_prompt_tokens: int, max_batch: int) -> None:
    points = pass_points(max_prompt_tokens=max_prompt_tokens, max_batch=max_batch)
    kinds = [PassSample(shape=point.shape, seconds=1.0, source="").kind for point in points]

    assert len(set(points)) == len(points)
    assert all(kinds.count(kind) > NUM_FOLDS for kind in PassKind)


@given(max_prompt_tokens=st.integers(64, 8192), max_batch=st.integers(4, 128))
def test_decode_points_stay_within_the_memory_that_the_prompt_bounds(max_prompt_tokens: int, max_batch: int) -> None:
    points = pass_points(max_prompt_tokens=max_prompt_tokens, max_batch=max_batch)

    for point in points:
        if not point.chunk_tokens:
            assert point.num_sequences * point.context <= KV_TOKENS_PER_PROMPT_TOKEN * max_prompt_tokens


@pytest.mark.parametrize(("max_prompt_tokens", "max_batch"), [(63, 32), (0, 32), (1024, 3)])
def test_points_of_too_small_a_plan_are_refused(max_prompt_tokens: int, max_batch: int) -> None:
    with pytest.raises(ConfigError):
        pass_points(max_prompt_tokens=max_prompt_tokens, max_batch=max_batch)


def test_point_needs_pages_for_each_sequence_and_its_chunk() -> None:
    point = PassPoint(chunk_start=16, chunk_tokens=17, num_sequences=3, context=16)

    assert point.pages_per_sequence(page_slots=16) == 2
    assert point.num_pages(page_slots=16) == 3 * 2 + 3


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        (64, (1, 2, 3, 4)),
        (1000, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
        (1024, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
    ],
)
def test_pushes_grow_twice_in_each_doubling_up_to_the_longest_prompt(tokens: int, pages: tuple[int, ...]) -> None:
    assert push_pages(max_prompt_tokens=tokens, page_slots=16) == pages


def test_timings_give_undisturbed_passes_in_the_order_of_the_shapes() -> None:
    timings = Timings()
    decode, prefill = PassPoint(num_sequences=2, context=8), PassPoint(chunk_tokens=4)
    timings.passes = {0: [(decode, 3.0), (decode, 1.0)], 1: [(prefill, 5.0), (decode, 2.0)]}
    timings.pushes = {4096: [0.1, 0.3]}

    assert [(sample.shape, sample.seconds) for sample in timings.pass_samples()] == [
        (prefill.shape, 5.0),
        (decode.shape, 1.0),
    ]
    assert timings.deviations() == (3.0, 1.0, 1.0, 2.0)
    assert timings.push_samples()[0].seconds == pytest.approx(0.2)
    assert "4096 bytes" in format_timings(timings)


def test_profile_table_shows_how_far_the_model_is_off_each_sample() -> None:
    profile = Profile(
        subject="a subject",
        sources={"here": Source(made_by="a test", date="today", machine="a machine")},
        passes=(
            PassSample(shape=chunk_shape(start=0, stop=100), seconds=0.1, source="here"),
            PassSample(shape=decode_shape(num_sequences=4, context=9), seconds=0.005, source="here"),
        ),
        pushes=(PushSample(num_bytes=1024 * 1024, seconds=0.01, source="here"),),
        model=affine_model(provenance="a test", pass_s=0.0, token_s=0.0011, push_s=0.005),
        accuracy=Accuracy(prefill_mape=0.0123, decode_mape=0.05, mixed_mape=None, push_mape=0.5),
    )
    table = format_profile(profile).splitlines()

    assert table[1].split()[-3:] == ["100.00", "110.00", "+10.0%"]
    assert table[2].split()[-3:] == ["5.00", "4.40", "-12.0%"]
    assert table[5].split() == ["1024", "10.00", "5.00", "-50.0%", "0.10"]
    assert table[-2] == "a test; today; a machine"
    assert format_accuracy(profile.accuracy) == "prefill_mape=1.2% decode_mape=5.0% push_mape=50.0%"
