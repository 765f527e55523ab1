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


@pytest.mark.skipif(not JIT_ENABLED, reason="too many rows")
def test_each_of_millions_of_ranks() -> None:
    rows = 3_000_000
    chances = np.arange(1, rows + 1) ** -0.8
    ranks = ranks_of(draw_zipf(rows, 0.8, 5_000_000, seed=2), rows)
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


@pytest.mark.skipif(not JIT_ENABLED, reason="too many draws")
def test_the_far_tail_of_the_law_is_there() -> None:
    """Rows of which no rank is known: their number is right, and no two draws of the far tail meet more than chance
    lets them."""
    ids = draw_zipf(1 << 40, 0.2, 300_000, seed=4)
    assert len(np.unique(ids)) > 299_900
    assert abs(deviation(np.bincount(ids >> 34, minlength=64), np.full(64, 1 / 64))) < 4


def test_one_row() -> None:
    for exponent in (0, 1, 1.3):
        assert not draw_zipf(1, exponent, 50, seed=0).any()


def test_extreme_exponents() -> None:
    assert len(set(draw_zipf(1 << 40, 100, 500, seed=0).tolist())) == 1
    assert len(set(draw_zipf(1 << 40, 1e-12, 500, seed=0).tolist())) == 500


def test_a_long_draw_is_made_of_short_ones() -> None:
    for exponent in (0, 1.05):
        whole = draw_zipf(1000, exponent, 90, seed=7)
        parts = [draw_zipf(1000, exponent, 30, seed=7, first=first) for first in (0, 30, 60)]
        assert np.array_equal(whole, np.concatenate(parts))
        assert not np.array_equal(whole, draw_zipf(1000, exponent, 90, seed=8))


def test_draws_do_not_follow_one_another() -> None:
    """Pairs of neighbouring draws are independent: so are sums modulo the rows."""
    ids = draw_zipf(20, 0.9, DRAWS, seed=5)
    pairs = np.bincount(ids[:-1:2] * 20 + ids[1::2], minlength=400)
    chances = np.bincount(ids, minlength=20) / len(ids)
    assert abs(deviation(pairs, np.outer(chances, chances).ravel())) < 4


def test_the_frequent_rows_are_others_by_another_scatter() -> None:
    tops = {int(np.bincount(draw_zipf(100, 2, 200, seed=0, scatter_seed=seed)).argmax()) for seed in range(8)}
    assert len(tops) > 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rows": 0}, "rows=0 must be in"),
        ({"rows": (1 << 40) + 1}, "rows="),
        ({"exponent": -0.1}, "exponent=-0.1: expected a number from 0 to 100"),
        ({"exponent": float("nan")}, "exponent=nan"),
        ({"count": -1}, "count=-1"),
        ({"first": -1}, "first=-1"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        draw_zipf(**({"rows": 9, "exponent": 1.0, "count": 1, "seed": 0} | arguments))
