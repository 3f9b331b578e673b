"""Models of GPUs that are not here: shapes, what fits, estimates, and tables with their provenance."""

import sys
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import MAX_MAPE, held_out_accuracy
from pdserve.perfmodel.gpu_tables import profile_of, tabulate
from pdserve.perfmodel.hardware import hardware
from pdserve.perfmodel.known import known_model, stored_profile, table_name
from pdserve.perfmodel.model_shape import MODEL_SHAPES, model_shape
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.port import PassShape
from pdserve.perfmodel.profile import encode_profile
from pdserve.perfmodel.roofline import roofline_model
from pdserve.perfmodel.sample import PassKind, chunk_shape, decode_shape


def placed(model: str, *, tp: int, dp: int = 1, on: str = "h200") -> Placement:
    return Placement(hardware=hardware(on), shape=model_shape(model), tensor_parallel_size=tp, data_parallel_size=dp)


STORED = [
    placed("deepseek-r1", tp=8),
    placed("deepseek-r1", tp=1, dp=8),
    placed("qwen3-coder-480b", tp=4),
    placed("qwen3-coder-480b", tp=8),
    *(placed("llama-3.1-70b", tp=tp) for tp in (2, 4, 8)),
    *(placed("llama-3.1-8b", tp=tp) for tp in (1, 2)),
]


class LinearEstimator:
    """Stands in for the package: 20 ms a pass, 0.1 ms a prefill token, 1 ms a decode token, 1 ns a key."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        shape = chunk_shape(start=prefix, stop=isl)
        return bs * (20 + 0.1 * shape.num_prefill_tokens + 1e-6 * shape.num_prefill_keys)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 20 + bs + 1e-6 * decode_shape(num_sequences=bs, context=isl).num_decode_keys


@pytest.mark.parametrize(
    ("model", "active"),
    [("deepseek-r1", 37e9), ("qwen3-coder-480b", 35e9), ("llama-3.1-70b", 70.6e9), ("llama-3.1-8b", 8.03e9)],
)
def test_model_shape_has_the_published_active_parameters(model: str, active: float) -> None:
    assert model_shape(model).active_params == pytest.approx(active, rel=0.03)


def test_model_shape_of_mla_has_one_latent_that_every_rank_holds() -> None:
    shape = model_shape("deepseek-r1")

    assert shape.kv_token_bytes == 70_272
    assert shape.kv_rank_token_bytes(8) == shape.kv_token_bytes


def test_model_shape_of_gqa_splits_its_heads_and_then_repeats_them() -> None:
    shape = model_shape("qwen3-coder-480b")

    assert shape.kv_token_bytes == 62 * 8 * 128 * 2 * 2
    assert shape.kv_rank_token_bytes(4) * 4 == shape.kv_token_bytes
    assert shape.kv_rank_token_bytes(16) * 8 == shape.kv_token_bytes


def test_more_tokens_touch_more_experts_until_all_are_touched() -> None:
    shape = model_shape("deepseek-r1")
    touched = [shape.touched_expert_params(count) / shape.expert_params for count in (1, 8, 64, 4096)]

    assert touched[0] == pytest.approx(8 / 256)
    assert touched == sorted(touched)
    assert touched[-1] == pytest.approx(1.0)


def test_placement_that_does_not_fit_has_no_cache_and_no_model() -> None:
    placement = placed("deepseek-r1", tp=4)

    assert placement.kv_tokens == 0
    with pytest.raises(ConfigError, match="does not fit"):
        known_model(placement)


@pytest.mark.parametrize(("what", "name"), [(hardware, "h300"), (model_shape, "gpt-7")])
def test_unknown_name_is_refused_with_the_known_ones(what: type, name: str) -> None:
    with pytest.raises(ConfigError, match="known are"):
        what(name)


@pytest.mark.parametrize("placement", STORED, ids=str)
def test_stored_table_is_accurate_and_says_where_it_comes_from(placement: Placement) -> None:
    profile = stored_profile(placement)

    assert profile is not None
    assert profile.accuracy.worst() <= MAX_MAPE
    recomputed = held_out_accuracy(profile.passes, (), seed=0)
    assert recomputed.worst() == pytest.approx(profile.accuracy.worst(), rel=0.05)
    assert "aiconfigurator-core" in profile.model.provenance
    assert "aiconfigurator-core" in profile.sources[profile.passes[0].source].made_by


@pytest.mark.parametrize("placement", STORED, ids=str)
def test_roofline_is_within_a_factor_of_the_stored_table(placement: Placement) -> None:
    """It is an estimate: between 0.4 and 1.7 of the table, averaged over prefill and over decode passes."""
    profile, estimate = stored_profile(placement), roofline_model(placement)

    assert profile is not None
    for kind in (PassKind.PREFILL, PassKind.DECODE):
        samples = [sample for sample in profile.passes if sample.kind is kind]
        ratios = [estimate.pass_s(sample.shape) / sample.seconds for sample in samples]
        assert 0.4 < sum(ratios) / len(ratios) < 1.7


def test_roofline_says_that_nothing_was_measured() -> None:
    assert "nothing measured" in known_model(placed("llama-3.1-70b", tp=4, on="h100")).provenance


@pytest.mark.parametrize("model", sorted(MODEL_SHAPES))
def test_roofline_is_faster_on_more_ranks_and_slower_for_more_work(model: str) -> None:
    few, many = roofline_model(placed(model, tp=4)), roofline_model(placed(model, tp=8))
    shape = chunk_shape(start=0, stop=8192)

    assert many.pass_s(shape) < few.pass_s(shape)
    assert few.pass_s(chunk_shape(start=8192, stop=16384)) > few.pass_s(shape) > few.pass_s(PassShape())
    assert few.push_s(10**9) > few.push_s(10**6) > 0


def test_table_of_an_estimator_answers_as_the_estimator_does() -> None:
    profile = profile_of(LinearEstimator(), placed("llama-3.1-8b", tp=1), made_by="a test", date="2026-01-01")

    assert profile.accuracy.worst() <= MAX_MAPE
    assert profile.model.pass_s(chunk_shape(start=0, stop=3000)) == pytest.approx(0.020 + 0.3 + 1e-9 * 4_501_500)
    assert {source.made_by for source in profile.sources.values()} == {"a test", "roofline estimate"}


def test_table_from_a_folder_takes_the_place_of_the_stored_one(tmp_path: Path) -> None:
    placement = placed("llama-3.1-8b", tp=1)
    profile = profile_of(LinearEstimator(), placement, made_by="a test", date="2026-01-01")
    (tmp_path / table_name(placement)).write_bytes(encode_profile(profile))

    assert known_model(placement, tables=tmp_path) == profile.model
    assert "nothing measured" in known_model(placed("llama-3.1-8b", tp=2), tables=tmp_path).provenance


def test_tables_without_the_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)

    with pytest.raises(ConfigError, match="gpu-tables"):
        tabulate(placed("llama-3.1-8b", tp=1), date="2026-01-01")
