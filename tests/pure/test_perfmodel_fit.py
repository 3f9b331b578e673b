"""Fitting a performance model: planted coefficients come back, and a wrong form is reported as wrong."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import MAX_MAPE, NO_PUSH, fit_model, fit_push, held_out_accuracy, pass_error
from pdserve.perfmodel.fitted import FittedModel, affine_model
from pdserve.perfmodel.least_squares import nonnegative_weights
from pdserve.perfmodel.port import PassShape
from pdserve.perfmodel.sample import PassKind, PassSample, PushSample, chunk_shape, decode_shape, mixed_shape

PLANTED = affine_model(
    provenance="planted",
    pass_s=0.030,
    token_s=0.003,
    decode_token_s=0.001,
    prefill_key_s=2e-7,
    decode_key_s=5e-6,
    push_s=1e-4,
    push_byte_s=2e-10,
)
SHAPES = (
    *(
        chunk_shape(start=start, stop=start + num_tokens)
        for start in (0, 512, 2048)
        for num_tokens in (4, 16, 64, 128, 256, 512, 1024)
    ),
    *(
        decode_shape(num_sequences=num_sequences, context=context)
        for num_sequences in (1, 2, 4, 8, 16, 32)
        for context in (64, 256, 1024)
    ),
    *(
        mixed_shape(chunk_shape(start=0, stop=num_tokens), decode_shape(num_sequences=num_sequences, context=256))
        for num_tokens in (32, 128, 256)
        for num_sequences in (2, 8, 24)
    ),
)
NUM_BYTES = tuple(4096 * 2**power for power in range(12))


def samples_of(seconds: Callable[[PassShape], float], *, noise: float) -> list[PassSample]:
    generator = np.random.default_rng(7)
    return [
        PassSample(shape=shape, seconds=seconds(shape) * float(1 + noise * generator.standard_normal()), source="test")
        for shape in SHAPES
    ]


def pushes_of(model: FittedModel) -> list[PushSample]:
    return [PushSample(num_bytes=num, seconds=model.push_s(num), source="test") for num in NUM_BYTES]


def test_fit_without_noise_gives_the_planted_coefficients_back() -> None:
    fitted = fit_model(
        samples_of(PLANTED.pass_s, noise=0), push_bytes_s=fit_push(pushes_of(PLANTED)), provenance="test"
    )

    assert fitted.prefill_key_s == pytest.approx(PLANTED.prefill_key_s, rel=1e-6)
    assert fitted.decode_key_s == pytest.approx(PLANTED.decode_key_s, rel=1e-6)
    assert fitted.tokens_s(512) - fitted.tokens_s(256) == pytest.approx(256 * 0.003)
    assert fitted.push_s(10**6) == pytest.approx(PLANTED.push_s(10**6))
    assert fitted.provenance == "test"


def test_fit_with_noise_predicts_unseen_shapes_within_the_noise() -> None:
    fitted = fit_model(samples_of(PLANTED.pass_s, noise=0.03), push_bytes_s=NO_PUSH, provenance="test")
    unseen = (
        chunk_shape(start=300, stop=700),
        decode_shape(num_sequences=12, context=700),
        mixed_shape(chunk_shape(start=64, stop=256), decode_shape(num_sequences=6, context=400)),
    )

    assert [fitted.pass_s(shape) for shape in unseen] == pytest.approx(
        [PLANTED.pass_s(shape) for shape in unseen], rel=0.04
    )


def test_held_out_error_with_noise_is_about_the_noise() -> None:
    accuracy = held_out_accuracy(samples_of(PLANTED.pass_s, noise=0.03), pushes_of(PLANTED), seed=1)

    assert accuracy.prefill_mape is not None
    assert accuracy.decode_mape is not None
    assert accuracy.mixed_mape is not None
    assert 0.005 < accuracy.prefill_mape < 0.06
    assert 0.005 < accuracy.decode_mape < 0.06
    assert 0.005 < accuracy.mixed_mape < 0.06
    assert accuracy.push_mape == pytest.approx(0.0, abs=1e-9)
    assert accuracy.worst() <= MAX_MAPE


def test_held_out_error_of_a_pass_that_tokens_and_keys_do_not_explain_is_high() -> None:
    """Every other prompt length costs twice as much, as with a kernel that handles only some sizes well."""

    def jagged(shape: PassShape) -> float:
        tokens = shape.num_prefill_tokens + shape.num_decode_tokens
        return 0.02 * (1 + tokens.bit_length() % 2) * (1 + shape.num_prefill_keys % 7)

    accuracy = held_out_accuracy(samples_of(jagged, noise=0), pushes_of(PLANTED), seed=1)

    assert accuracy.prefill_mape is not None
    assert accuracy.prefill_mape > 2 * MAX_MAPE
    assert accuracy.worst() > MAX_MAPE


def test_held_out_error_is_not_that_of_the_points_fitted_to() -> None:
    """Pure noise in few samples: a model with as many bends as points would look right where it was fitted."""
    noisy = samples_of(PLANTED.pass_s, noise=0.3)
    fitted = fit_model(noisy, push_bytes_s=NO_PUSH, provenance="test")
    seen = float(np.mean([pass_error(fitted, sample) for sample in noisy if sample.kind is PassKind.DECODE]))
    accuracy = held_out_accuracy(noisy, (), seed=3)

    assert accuracy.decode_mape is not None
    assert accuracy.decode_mape > seen


def test_held_out_error_is_the_same_for_the_same_seed_and_not_for_another() -> None:
    samples = samples_of(PLANTED.pass_s, noise=0.1)

    assert held_out_accuracy(samples, (), seed=1) == held_out_accuracy(samples, (), seed=1)
    assert held_out_accuracy(samples, (), seed=1) != held_out_accuracy(samples, (), seed=2)


def test_held_out_error_of_kinds_that_were_not_measured_is_none() -> None:
    accuracy = held_out_accuracy(
        [sample for sample in samples_of(PLANTED.pass_s, noise=0) if sample.kind is PassKind.PREFILL], (), seed=0
    )

    assert (accuracy.decode_mape, accuracy.mixed_mape, accuracy.push_mape) == (None, None, None)


def test_fit_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        fit_model((), push_bytes_s=NO_PUSH, provenance="test")
    with pytest.raises(ConfigError):
        fit_push(())


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), num_columns=st.integers(1, 5))
def test_nonnegative_weights_are_as_good_as_the_best_choice_of_columns(seed: int, num_columns: int) -> None:
    """The slow reference tries plain least squares over every set of columns and keeps what is not negative."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((8, num_columns))
    target = generator.standard_normal(8)
    best = float(target @ target)
    for chosen in itertools.product((False, True), repeat=num_columns):
        columns = features[:, np.array(chosen)]
        solution = np.linalg.lstsq(columns, target, rcond=None)[0]
        if (solution >= 0).all():
            best = min(best, float(np.sum((columns @ solution - target) ** 2)))

    weights = nonnegative_weights(features, target)

    assert (weights >= 0).all()
    assert float(np.sum((features @ weights - target) ** 2)) == pytest.approx(best, abs=1e-9)


def test_nonnegative_weights_of_columns_of_very_different_scale_are_exact() -> None:
    counts = np.arange(6, dtype=np.float64)
    features: NDArray[np.float64] = np.column_stack([np.ones(6), counts * 1e9, counts**2 * 1e-9, np.zeros(6)])
    planted = np.array([3.0, 2e-9, 5e9, 0.0])

    assert nonnegative_weights(features, np.asarray(features @ planted)) == pytest.approx(planted, rel=1e-6)
