"""Zipf's law by formula, against sums over every row and against curves of generated ids."""

import numpy as np
import pytest

from bench.workload import ids_of
from tierstore.plan import Accesses, once_a_batch
from tierstore.plan.curves import curve, frequency_curve, lru_curve, popularity
from tierstore.plan.traces import zipf_bins

BATCHES = 250


@pytest.mark.parametrize("exponent", [0.0, 0.999999, 1.0, 2.0])
def test_bins_are_all_rows_with_the_shares_of_the_law(exponent: float) -> None:
    for rows in (1, 256, 257, 20_000):
        counts, shares = zipf_bins(rows, exponent)
        weights = np.arange(1, rows + 1) ** -exponent
        assert counts.sum() == rows
        exact = pytest.approx(weights / weights.sum(), rel=0.01 * max(exponent, 1e-9) + 1e-9)
        assert np.repeat(shares, counts.astype(int)) == exact


@pytest.mark.parametrize(("rows", "exponent", "lookups"), [(2000, 0.6, 300), (1000, 0.0, 200), (20_000, 1.2, 1000)])
def test_lru_is_that_of_generated_ids(rows: int, exponent: float, lookups: int) -> None:
    """Within 0.8 points, also of caches so small that a batch flushes the one before."""
    ids = ids_of(np.random.default_rng(7), rows, BATCHES * lookups, exponent)
    accesses = once_a_batch(Accesses(ids, np.arange(BATCHES + 1) * lookups, ("all",)))
    found = popularity([(rows, exponent, float(lookups))])
    sizes = [int(share * found.unique) for share in (0.3, 0.6, 0.8, 1.0, 1.15, 1.3, 2.0, 3.0)]
    known, formula = curve(accesses, "lru", sizes=sizes, skip=BATCHES // 2), lru_curve(found)
    for size in known.sizes.tolist():
        assert formula.hit_rate(size) == pytest.approx(known.hit_rate(size), abs=0.008), size


def test_as_many_rows_as_there_can_be_and_few() -> None:
    found = popularity([(1 << 40, 1.05, 1e6)] * 30)
    assert len(found.rows) < 2000
    assert found.rows.sum() == pytest.approx(30 * 2**40)
    assert 0 < found.unique < 30e6
    for made in (lru_curve(found), frequency_curve(found)):
        assert (np.diff(made.miss_ratios) <= 0).all()
        assert made.sizes[-1] == 30 << 40
        assert made.hit_rate(1e9) > made.hit_rate(1e6) > 0
    alone = popularity([(1, 1.05, 10.0)])
    assert alone.unique == 1
    assert lru_curve(alone).hit_rate(1) == pytest.approx(1)
    assert frequency_curve(alone).hit_rate(1) == 1
    assert popularity([(1, 1.05, 0.25)]).unique == 0.25
    nobody = popularity([(100, 1.05, 0.0)])
    assert nobody.unique == lru_curve(nobody).miss_ratio(1) == 0
