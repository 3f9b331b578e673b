"""From samples to a `FittedModel`, and how far off it is on samples that it has not seen."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from pdserve.errors import ConfigError
from pdserve.perfmodel.curve import Curve
from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.least_squares import Matrix, nonnegative_weights
from pdserve.perfmodel.port import PerfModel
from pdserve.perfmodel.sample import PassKind, PassSample, PushSample

Sample = TypeVar("Sample", PassSample, PushSample)

KNOT_RATIO = 1.9
"""Least ratio of one bend's count to the one before: a power of two each, where there are samples."""
NUM_FOLDS = 5
NO_PUSH = Curve(counts=(0,), seconds=(0.0,))
MAX_MAPE = 0.08
"""A model that is off by more than this on unseen samples decides nothing."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean absolute error, relative to what was measured, of samples that the model was not fitted to.

    None where there were no such samples.
    """

    prefill_mape: float | None
    decode_mape: float | None
    mixed_mape: float | None
    push_mape: float | None

    def worst(self) -> float:
        errors = (self.prefill_mape, self.decode_mape, self.mixed_mape, self.push_mape)
        return max((error for error in errors if error is not None), default=0.0)


def fit_model(passes: Sequence[PassSample], *, push_bytes_s: Curve, provenance: str) -> FittedModel:
    """The model with the least squared relative error. Raises: `ConfigError` when there is nothing to fit to."""
    if not passes:
        raise ConfigError("a performance model needs at least one measured pass")
    tokens = _Bends.through([sample.shape.num_prefill_tokens + sample.shape.num_decode_tokens for sample in passes])
    decodes = _Bends.through([0, *(sample.shape.num_decode_tokens for sample in passes)])
    features = np.column_stack(
        [
            tokens.features([sample.shape.num_prefill_tokens + sample.shape.num_decode_tokens for sample in passes]),
            # The first is the curve's value without decode tokens, which is 0.
            decodes.features([sample.shape.num_decode_tokens for sample in passes])[:, 1:],
            [sample.shape.num_prefill_keys for sample in passes],
            [sample.shape.num_decode_keys for sample in passes],
        ]
    )
    weights = _relative_weights(features, [sample.seconds for sample in passes])
    decode_start, key_start = len(tokens.counts), len(tokens.counts) + len(decodes.counts) - 1
    return FittedModel(
        provenance=provenance,
        tokens_s=tokens.curve(weights[:decode_start]),
        decode_tokens_s=decodes.curve(np.concatenate([[0.0], weights[decode_start:key_start]])),
        prefill_key_s=float(weights[key_start]),
        decode_key_s=float(weights[key_start + 1]),
        push_bytes_s=push_bytes_s,
    )


def fit_push(pushes: Sequence[PushSample]) -> Curve:
    """Seconds by bytes, with the least squared relative error. Raises: as `fit_model`."""
    if not pushes:
        raise ConfigError("a performance model needs at least one measured push")
    bends = _Bends.through([sample.num_bytes for sample in pushes])
    features = bends.features([sample.num_bytes for sample in pushes])
    return bends.curve(_relative_weights(features, [sample.seconds for sample in pushes]))


def held_out_accuracy(passes: Sequence[PassSample], pushes: Sequence[PushSample], *, seed: int) -> Accuracy:
    """Each sample is compared with a model that was fitted to the other folds; the seed deals them out.

    Requires: of each kind that is there, two samples or more; kinds may be missing.
    """
    pass_errors: dict[PassKind, list[float]] = {kind: [] for kind in PassKind}
    for held_out, kept in _folds(passes, seed=seed, group=lambda sample: sample.kind.value):
        model = fit_model(kept, push_bytes_s=NO_PUSH, provenance="")
        for sample in held_out:
            pass_errors[sample.kind].append(pass_error(model, sample))
    push_errors: list[float] = []
    for held_out, kept in _folds(pushes, seed=seed, group=lambda sample: "push"):
        curve = fit_push(kept)
        push_errors += [abs(curve(sample.num_bytes) / sample.seconds - 1) for sample in held_out]
    return Accuracy(
        prefill_mape=_mean(pass_errors[PassKind.PREFILL]),
        decode_mape=_mean(pass_errors[PassKind.DECODE]),
        mixed_mape=_mean(pass_errors[PassKind.MIXED]),
        push_mape=_mean(push_errors),
    )


def pass_error(model: PerfModel, sample: PassSample) -> float:
    """Relative to what was measured."""
    return abs(model.pass_s(sample.shape) / sample.seconds - 1)


class _Bends(msgspec.Struct, frozen=True):
    """The counts at which a curve may bend, and the curve's value at any count as a sum of its rises between them."""

    counts: tuple[int, ...]

    @classmethod
    def through(cls, counts: Sequence[int]) -> "_Bends":
        """Some of these, so that none lies where nothing was measured: the least, the greatest, and between them
        those that are far enough from their neighbours."""
        distinct = sorted(set(counts))
        bends = distinct[:1]
        for count in distinct[1:]:
            if count >= KNOT_RATIO * bends[-1]:
                bends.append(count)
        if distinct[-1] != bends[-1]:
            bends[len(bends) - 1 if len(bends) > 1 else len(bends) :] = [distinct[-1]]
        return cls(tuple(bends))

    def features(self, counts: Sequence[int]) -> Matrix:
        """A row for each count: 1, then the share of each piece's rise that it has behind it. The outer pieces go on,
        as those of `Curve` do."""
        bends = np.array(self.counts, dtype=np.float64)
        shares = (np.array(counts, dtype=np.float64)[:, None] - bends[:-1]) / np.diff(bends)
        low = np.zeros(shares.shape[1])
        high = np.ones(shares.shape[1])
        if shares.shape[1]:
            low[0], high[-1] = -np.inf, np.inf
        return np.column_stack([np.ones(len(counts)), np.clip(shares, low, high)])

    def curve(self, weights: Matrix) -> Curve:
        return Curve(counts=self.counts, seconds=tuple(np.cumsum(weights).tolist()))


def _relative_weights(features: Matrix, seconds: Sequence[float]) -> Matrix:
    return nonnegative_weights(features / np.array(seconds)[:, None], np.ones(len(seconds)))


def _folds(
    samples: Sequence[Sample], *, seed: int, group: Callable[[Sample], str]
) -> list[tuple[list[Sample], list[Sample]]]:
    """Pairs of what is held out and what is kept. Each group is spread evenly over the folds."""
    generator = np.random.default_rng(seed)
    fold_of = np.empty(len(samples), dtype=np.int64)
    for name in sorted({group(sample) for sample in samples}):
        members = [index for index, sample in enumerate(samples) if group(sample) == name]
        fold_of[generator.permutation(members)] = np.arange(len(members)) % NUM_FOLDS
    return [
        (
            [sample for sample, fold in zip(samples, fold_of, strict=True) if fold == held_out],
            [sample for sample, fold in zip(samples, fold_of, strict=True) if fold != held_out],
        )
        for held_out in range(NUM_FOLDS)
        if held_out in fold_of
    ]


def _mean(errors: Sequence[float]) -> float | None:
    return float(np.mean(errors)) if errors else None
