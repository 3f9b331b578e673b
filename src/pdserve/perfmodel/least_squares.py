"""Least squares whose weights are not negative: what a pass costs more never makes it faster.

Source: C. L. Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23, section 3.
"""

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import InternalError

Matrix = NDArray[np.float64]
TOLERANCE = 1e-10
"""Of a gradient, for columns of norm 1 and a target of any size: relative to the target's norm."""


def nonnegative_weights(features: Matrix, target: Matrix) -> Matrix:
    """The weights, none negative, that bring `features @ weights` nearest to `target`.

    Requires: as many rows as the target has values.
    Raises: `InternalError` when three changes a column were not enough, as finite arithmetic can bring about.
    """
    norms = np.linalg.norm(features, axis=0)
    columns = features / np.where(norms > 0, norms, 1.0)
    weights = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], dtype=bool)
    threshold = TOLERANCE * float(np.linalg.norm(target))
    for _ in range(3 * columns.shape[1] + 1):
        gradient = np.where(free, -np.inf, columns.T @ (target - columns @ weights))
        best = int(np.argmax(gradient))
        if gradient[best] <= threshold:
            return weights / np.where(norms > 0, norms, 1.0)
        free[best] = True
        weights = _descend(columns, target, weights, free)
    raise InternalError("the fit of a performance model found no end; measure more points")


def _descend(columns: Matrix, target: Matrix, weights: Matrix, free: NDArray[np.bool_]) -> Matrix:
    """The best weights over the free columns; those that would turn negative are fixed at 0, in place in `free`."""
    while True:
        candidate = np.zeros_like(weights)
        candidate[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        negative = free & (candidate <= 0)
        if not negative.any():
            return candidate
        steps = np.full_like(weights, np.inf)
        steps[negative] = weights[negative] / (weights[negative] - candidate[negative])
        first = int(np.argmin(steps))
        weights = np.maximum(weights + steps[first] * (candidate - weights), 0.0)
        weights[first] = 0.0
        free[first] = False
