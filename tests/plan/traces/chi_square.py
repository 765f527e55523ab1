"""Whether counts are those of a law; and the rows that ranks have."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.kernels.jit import kernel
from tierstore.plan.traces.zipf import Scatter, scattered

__all__ = ["deviation", "scatter"]

_LEAST = 10


def deviation(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Pearson's statistic as standard deviations of a normal law, by Wilson and Hilferty's cube root (1931).

    Cells of few expected counts are joined with their neighbours. Beyond 4 lie one in 30,000 fair samples; below -4 as
    many, where counts are too regular to be random.
    """
    expected = chances * counts.sum()
    cells = np.cumsum(expected) // _LEAST
    groups = np.unique(np.minimum(cells, cells[-1] - 1), return_inverse=True)[1]
    seen, wanted = np.bincount(groups, weights=counts), np.bincount(groups, weights=expected)
    statistic, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1
    part = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - part)) / part**0.5)


def scatter(numbers: NDArray[np.int64], law: Scatter) -> NDArray[np.int64]:
    """The rows of some numbers, int64 [n] from 0 to ``rows - 1``."""
    out = np.empty_like(numbers)
    _scatter(numbers, *law, out)
    return out


@kernel
def _scatter(numbers: Any, rows: Any, mask: Any, shift: Any, keys: Any, out: Any) -> None:
    for position in range(numbers.shape[0]):
        out[position] = scattered(numbers[position], rows, mask, shift, keys)
