"""Non-negative least squares: what work costs, from the times of steps."""

from typing import Any, Final

import numpy as np

from .arrays import Float64s

_MOST_STEPS: Final = 100


def solve_nonnegative(matrix: Float64s, target: Float64s) -> Float64s:
    """The x >= 0 for which ``matrix @ x`` (float64 [equations, unknowns]) is nearest to ``target``.
    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23: unknowns are let off zero one by one, the one
    along which the error falls fastest first; those that would fall below zero go back."""
    unknowns = matrix.shape[1]
    scale = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(np.float64).tiny)
    scaled = matrix / scale
    found, is_free = np.zeros(unknowns), np.zeros(unknowns, np.bool_)
    for _ in range(_MOST_STEPS):
        slopes = np.where(is_free, 0.0, scaled.T @ (target - scaled @ found))
        if slopes.max(initial=0.0) <= 1e-12:
            break
        is_free[int(np.argmax(slopes))] = True
        while True:
            wanted = np.zeros(unknowns)
            wanted[is_free] = np.linalg.lstsq(scaled[:, is_free], target, rcond=None)[0]
            if (wanted[is_free] > 0).all():
                found = wanted
                break
            falling: Any = is_free & (wanted <= 0)
            # As far as the first of them reaches zero.
            share = np.min(found[falling] / (found[falling] - wanted[falling]))
            found = found + share * (wanted - found)
            is_free &= found > 1e-15
            found[~is_free] = 0.0
    solution: Float64s = found / scale
    return solution
