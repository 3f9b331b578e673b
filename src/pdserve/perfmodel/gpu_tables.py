"""Times of GPUs that are not here, from the measured kernels that the `aiconfigurator-core` package carries.

The package composes a pass from measurements of its matrix products, attention and exchanges; it is an optional extra,
Apache-2.0. What it answers for a grid of passes becomes a profile like that of an engine measured here, so its held-out
error is that of our fit to the package, not of the package to a GPU.
"""

from importlib import import_module, metadata
from itertools import product
from typing import Protocol

from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import fit_model, held_out_accuracy
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.port import PassShape
from pdserve.perfmodel.profile import Profile, Source
from pdserve.perfmodel.roofline import push_curve
from pdserve.perfmodel.sample import PassSample, chunk_shape, decode_shape

PACKAGE = "aiconfigurator-core"
BACKEND = "vllm"
"""The engine whose kernels were measured: of the package's, the one with all that the models here need on H200."""
SEED = 0
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STARTS = (0, 2048, 16384)
BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
CONTEXTS = (512, 2048, 8192, 32768)
TABLE = "table"
LINK = "link"
QUANT_MODES = {1: "fp8_block", 2: "bfloat16"}
"""The package's names, by bytes of a parameter."""
MS_PER_S = 1000


class Estimator(Protocol):
    """The part of the package's `EngineHandle` that is used. Milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float: ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float: ...


def tabulate(placement: Placement, *, date: str) -> Profile:
    """What the package knows on this day.

    Raises: `ConfigError` without the package, or when it has no measurements for this placement.
    """
    engine = import_estimator(placement)
    version = metadata.version(PACKAGE)
    return profile_of(engine, placement, made_by=f"{PACKAGE} {version}, kernels of {BACKEND}", date=date)


def import_estimator(placement: Placement) -> Estimator:
    """Raises: as `tabulate`."""
    try:
        handle = import_module("aiconfigurator_core.sdk.engine").EngineHandle
    except ImportError:
        raise ConfigError(
            f"the tables of GPUs come from {PACKAGE}, which is not installed; run pip install 'pdserve[gpu-tables]'"
        ) from None
    quant_mode = QUANT_MODES[placement.shape.param_bytes]
    try:
        return handle.compile(
            placement.shape.hub_id,
            placement.hardware.table_system,
            BACKEND,
            tp_size=placement.tensor_parallel_size,
            attention_dp_size=placement.data_parallel_size,
            moe_tp_size=1,
            moe_ep_size=placement.num_accelerators if placement.shape.num_experts > 1 else 1,
            gemm_quant_mode=quant_mode,
            moe_quant_mode=quant_mode,
        )
    except Exception as error:
        raise _missing(placement, error) from error


def profile_of(engine: Estimator, placement: Placement, *, made_by: str, date: str) -> Profile:
    """Raises: `ConfigError` when the estimator can't answer for one of the passes."""
    try:
        passes = tuple(_pass_samples(engine))
    except Exception as error:
        raise _missing(placement, error) from error
    return Profile(
        subject=str(placement),
        sources={
            TABLE: Source(made_by=made_by, date=date, machine=placement.hardware.table_system),
            LINK: Source(made_by="roofline estimate", date=date, machine=placement.hardware.source),
        },
        passes=passes,
        pushes=(),
        model=fit_model(
            passes,
            push_bytes_s=push_curve(placement),
            provenance=f"{made_by}, {placement.hardware.table_system}; pushes: {placement.hardware.source}",
        ),
        accuracy=held_out_accuracy(passes, (), seed=SEED),
    )


def _pass_samples(engine: Estimator) -> list[PassSample]:
    samples: list[PassSample] = []

    def add(shape: PassShape, ms: float) -> None:
        samples.append(PassSample(shape=shape, seconds=ms / MS_PER_S, source=TABLE))

    for start, num_tokens in product(STARTS, CHUNKS):
        stop = start + num_tokens
        add(chunk_shape(start=start, stop=stop), engine.predict_prefill_latency(1, stop, start))
    for context, batch in product(CONTEXTS, BATCHES):
        add(decode_shape(num_sequences=batch, context=context), engine.predict_decode_latency(batch, context, 2))
    return samples


def _missing(placement: Placement, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(f"{PACKAGE} has no times for {placement}: {reason}")
