"""Draws by Zipf's law, against the exact chances of each rank; and the permutation of a table's rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.plan.traces import draw_zipf, scattered

DRAWS = 400_000
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


@pytest.mark.parametrize("exponent", [0, 0.99, 1, 1.05, 6.5])
@pytest.mark.parametrize("rows", [2, 1000])
def test_each_rank_has_its_chance(rows: int, exponent: float) -> None:
    chances = np.arange(1, rows + 1) ** -float(exponent)
    ids = draw_zipf(rows, exponent, DRAWS, seed=1)
    ranks = np.argsort(scattered(np.arange(rows), rows, 0))[ids]
    assert abs(deviation(np.bincount(ranks, minlength=rows), chances / chances.sum())) < 4
    assert np.array_equal(ids, draw_zipf(rows, exponent, DRAWS, seed=1))


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
def test_no_two_rows_meet_and_neighbours_do_not_stay_neighbours(seed: int) -> None:
    for rows in (*range(1, 40), 255, 256, 257):
        assert sorted(scattered(np.arange(rows), rows, seed).tolist()) == list(range(rows))
    found = scattered(np.arange(40_000), 3_000_000, 9)
    regions = np.bincount(found * 50 // 3_000_000, minlength=50)
    assert abs(deviation(regions, np.full(50, 1 / 50))) < 4
    assert (np.abs(np.diff(found)) < 3000).mean() < 0.01
