"""The fitted performance model: what it answers for a pass and a push."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.perfmodel.curve import Curve
from pdserve.perfmodel.fitted import FittedModel, affine_model
from pdserve.perfmodel.port import PassShape, PerfModel


def test_curve_between_points_is_straight() -> None:
    curve = Curve(counts=(1, 3, 7), seconds=(1.0, 2.0, 10.0))

    assert [curve(count) for count in (1, 2, 3, 4, 7)] == [1.0, 1.5, 2.0, 4.0, 10.0]


def test_curve_outside_its_points_goes_on_and_never_below_nothing() -> None:
    curve = Curve(counts=(10, 20), seconds=(1.0, 3.0))

    assert curve(25) == 4.0
    assert curve(8) == pytest.approx(0.6)
    assert curve(0) == 0.0


def test_curve_of_one_point_is_constant() -> None:
    curve = Curve(counts=(5,), seconds=(2.0,))

    assert (curve(0), curve(5), curve(9)) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [((), ()), ((1,), ()), ((2, 1), (0.0, 1.0)), ((1, 2), (1.0, 0.5)), ((1,), (-1.0,)), ((1,), (float("nan"),))],
)
def test_curve_that_is_none_is_refused(counts: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Curve(counts=counts, seconds=seconds)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5)), min_size=1, max_size=8), st.integers(0, 500), st.data())
def test_curve_never_falls(steps: list[tuple[int, float]], low: int, data: st.DataObject) -> None:
    counts = tuple(sum(width for width, _ in steps[: index + 1]) for index in range(len(steps)))
    seconds = tuple(sum(rise for _, rise in steps[: index + 1]) for index in range(len(steps)))
    curve = Curve(counts=counts, seconds=seconds)
    high = data.draw(st.integers(low, 600))

    assert curve(low) <= curve(high) * (1 + 1e-9)


def test_affine_model_adds_tokens_and_keys() -> None:
    model: PerfModel = affine_model(
        provenance="a test",
        pass_s=1.0,
        token_s=0.1,
        decode_token_s=0.01,
        prefill_key_s=0.001,
        decode_key_s=0.002,
        push_s=0.5,
        push_byte_s=1e-3,
    )

    assert model.pass_s(PassShape(num_prefill_tokens=10, num_prefill_keys=55)) == pytest.approx(2.055)
    mixed = PassShape(num_prefill_tokens=10, num_prefill_keys=55, num_decode_tokens=5, num_decode_keys=100)
    assert model.pass_s(mixed) == pytest.approx(1.0 + 1.5 + 0.05 + 0.055 + 0.2)
    assert model.push_s(1000) == pytest.approx(1.5)


def test_fitted_model_survives_its_encoding() -> None:
    model = affine_model(provenance="a test", pass_s=1.0, token_s=0.1)

    assert msgspec.json.decode(msgspec.json.encode(model), type=FittedModel) == model


def test_fitted_model_with_negative_attention_is_refused() -> None:
    with pytest.raises(ConfigError):
        affine_model(provenance="a test", pass_s=1.0, token_s=0.1, decode_key_s=-1.0)
