"""Whether counts are those of a law."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["deviation"]

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
