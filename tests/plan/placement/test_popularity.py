"""Distinct rows and ids by Zipf's law, against sums over every row."""

import numpy as np
import pytest

from tierstore.plan.placement.popularity import draw_ids, expected_distinct


def chances(num_rows: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.5])
@pytest.mark.parametrize("num_rows", [1, 7, 4096, 4097, 300_000])
@pytest.mark.parametrize("lookups", [1, 500, 1e6])
def test_distinct_rows_are_the_sum_over_all(num_rows: int, lookups: float, exponent: float) -> None:
    with np.errstate(divide="ignore"):
        expected = (1 - np.exp(lookups * np.log1p(-np.minimum(chances(num_rows, exponent), 1)))).sum()
    assert expected_distinct(num_rows, lookups, exponent) == pytest.approx(expected, rel=1e-3)


def test_distinct_rows_at_the_edges() -> None:
    assert expected_distinct(10, 0, 1.0) == 0
    assert expected_distinct(10, 1, 1.0) == pytest.approx(1)
    assert expected_distinct(10, 1e9, 0.0) == pytest.approx(10)
    # Uniform, by its closed form, of more rows than could be summed.
    rows, lookups = 1 << 40, 1e9
    assert expected_distinct(rows, lookups, 0.0) == pytest.approx(-rows * np.expm1(lookups * np.log1p(-1 / rows)))


@pytest.mark.parametrize("exponent", [0.0, 0.9, 1.0, 1.3])
def test_drawn_ids_follow_the_law(exponent: float) -> None:
    num_rows, count = 20_000, 400_000
    ids = draw_ids(np.random.default_rng(3), num_rows, count, exponent)
    assert ids.min() >= 0
    assert ids.max() < num_rows
    counts = -np.sort(-np.bincount(ids, minlength=num_rows))
    expected = count * chances(num_rows, exponent)
    for top in (1, 10, 100, 5000):
        # The busiest of equally likely rows are busier than the mean: compare heads only where rows differ.
        if exponent:
            share = expected[:top].sum()
            assert abs(counts[:top].sum() - share) <= 6 * np.sqrt(share) + 0.02 * share * (top > 100)
    distinct = expected_distinct(num_rows, count, exponent)
    assert abs(len(np.unique(ids)) - distinct) <= 6 * np.sqrt(distinct)


def test_ids_of_too_many_rows() -> None:
    with pytest.raises(ValueError, match="2\\^31"):
        draw_ids(np.random.default_rng(0), 1 << 32, 1, 1.0)
