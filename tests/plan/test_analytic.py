"""Zipf's law by formula, against sums over every row and against caches that are fed generated ids."""

from collections import OrderedDict

import numpy as np
import pytest

from bench.workload import ids_of
from tierstore.plan.curves import frequency_curve, lru_curve, popularity
from tierstore.plan.traces import zipf_bins

SHAPES = [(2000, 0.6, 300), (1000, 0.0, 200), (20_000, 1.2, 1000)]
BATCHES = 250


def batches_of(rows: int, exponent: float, lookups: int) -> list[list[int]]:
    """Distinct rows of each batch, in order of first use."""
    generator = np.random.default_rng(7)
    return [list(dict.fromkeys(ids_of(generator, rows, lookups, exponent).tolist())) for _ in range(BATCHES)]


def lru_hit_rate(batches: list[list[int]], size: int) -> float:
    """Of the second half."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for number, batch in enumerate(batches):
        for row in batch:
            if number >= BATCHES // 2:
                asked += 1
                hits += row in cache
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits / asked


@pytest.mark.parametrize("exponent", [0.0, 0.999999, 1.0, 2.0])
def test_bins_are_all_rows_with_the_shares_of_the_law(exponent: float) -> None:
    for rows in (1, 256, 257, 20_000):
        counts, shares = zipf_bins(rows, exponent)
        weights = np.arange(1, rows + 1) ** -exponent
        assert counts.sum() == rows
        exact = pytest.approx(weights / weights.sum(), rel=0.01 * max(exponent, 1e-9) + 1e-9)
        assert np.repeat(shares, counts.astype(int)) == exact


@pytest.mark.parametrize(("rows", "exponent", "lookups"), SHAPES)
def test_lru_is_as_simulated(rows: int, exponent: float, lookups: int) -> None:
    """Within 0.8 points, also of caches so small that a batch flushes the one before."""
    batches = batches_of(rows, exponent, lookups)
    found = popularity([(rows, exponent, float(lookups))])
    curve = lru_curve(found)
    for share in (0.3, 0.8, 1.0, 1.3, 3.0):
        size = int(share * found.unique)
        known = lru_hit_rate(batches, size)
        assert curve.hit_rate(size) == pytest.approx(known, abs=0.008), share


def test_as_many_rows_as_there_can_be_and_few() -> None:
    found = popularity([(1 << 40, 1.05, 1e6)] * 30)
    assert len(found.rows) < 2000
    assert found.rows.sum() == pytest.approx(30 * 2**40)
    assert 0 < found.unique < 30e6
    for curve in (lru_curve(found), frequency_curve(found)):
        assert (np.diff(curve.miss_ratios) <= 0).all()
        assert curve.sizes[-1] == 30 << 40
        assert curve.hit_rate(1e9) > curve.hit_rate(1e6) > 0
    alone = popularity([(1, 1.05, 10.0)])
    assert alone.unique == 1
    assert lru_curve(alone).hit_rate(1) == pytest.approx(1)
    assert frequency_curve(alone).hit_rate(1) == 1
    assert popularity([(1, 1.05, 0.25)]).unique == 0.25
    nobody = popularity([(100, 1.05, 0.0)])
    assert nobody.unique == 0
    assert lru_curve(nobody).miss_ratio(1) == 0
