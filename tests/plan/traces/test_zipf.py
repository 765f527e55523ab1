"""Draws by Zipf's law, against the exact chances of each rank."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.plan.traces.chi_square import deviation, scatter
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.traces import draw_zipf
from tierstore.plan.traces.zipf import scatter_of

pytestmark = pytest.mark.kernel
DRAWS = 400_000 if JIT_ENABLED else 3000


def ranks_of(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """From 0, the most frequent."""
    return np.argsort(scatter(np.arange(rows), scatter_of(rows, 0)))[ids]


@pytest.mark.parametrize("exponent", [0, 0.3, 0.99, 1, 1.05, 2, 6.5])
@pytest.mark.parametrize("rows", [2, 3, 50, 1000])
def test_each_rank_has_its_chance(rows: int, exponent: float) -> None:
    chances = np.arange(1, rows + 1) ** -float(exponent)
    ranks = ranks_of(draw_zipf(rows, exponent, DRAWS, seed=1), rows)
    assert abs(deviation(np.bincount(ranks, minlength=rows), chances / chances.sum())) < 4


def zeta_sum(exponent: float, first: int, last: int) -> float:
    """Sum of k^-exponent over [first, last], by Euler and Maclaurin; ``first`` large enough for it."""
    power = 1 - exponent
    area = (last**power - first**power) / power
    slopes = -exponent * (last ** (-exponent - 1) - first ** (-exponent - 1))
    return float(area + (first**-exponent + last**-exponent) / 2 + slopes / 12)


@pytest.mark.skipif(not JIT_ENABLED, reason="too many rows")
@pytest.mark.parametrize("exponent", [0.7, 1.05, 1.5])
def test_as_many_rows_as_there_can_be(exponent: float) -> None:
    """The first ranks each, then ranks by powers of two, then all others."""
    rows, known = 1 << 40, 1 << 20
    ids = draw_zipf(rows, exponent, 1_000_000, seed=3)
    assert 0 <= ids.min() <= ids.max() < rows
    row_of_rank = scatter(np.arange(known), scatter_of(rows, 0))
    order = np.argsort(row_of_rank)
    places = np.minimum(np.searchsorted(row_of_rank[order], ids), known - 1)
    ranks = np.where(row_of_rank[order[places]] == ids, order[places], known)
    edges = np.array([*range(64), *(1 << np.arange(6, 21)), rows])
    weights = np.arange(1, known + 1, dtype=np.float64) ** -exponent
    sums = [weights[low:high].sum() for low, high in pairwise(edges[:-1])]
    chances = np.array([*sums, zeta_sum(exponent, known + 1, rows)])
    counts = np.histogram(ranks, [*edges[:-1], known + 1])[0]
    assert abs(deviation(counts, chances / chances.sum())) < 4


def test_a_long_draw_is_made_of_short_ones() -> None:
    for exponent in (0, 1.05):
        whole = draw_zipf(1000, exponent, 90, seed=7)
        parts = [draw_zipf(1000, exponent, 30, seed=7, first=first) for first in (0, 30, 60)]
        assert np.array_equal(whole, np.concatenate(parts))
        assert not np.array_equal(whole, draw_zipf(1000, exponent, 90, seed=8))
