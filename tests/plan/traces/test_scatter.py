"""The permutation of a table's rows."""

import numpy as np
import pytest

from tests.plan.traces.chi_square import deviation, scatter
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.traces.zipf import scatter_of

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
def test_no_two_numbers_meet(seed: int) -> None:
    for rows in (*range(1, 40 if JIT_ENABLED else 12), 255, 256, 257):
        found = scatter(np.arange(rows), scatter_of(rows, seed))
        assert sorted(found.tolist()) == list(range(rows))


def test_many_rows_have_room_for_all() -> None:
    rows, count = 1 << 40, 5000 if JIT_ENABLED else 100
    found = scatter(np.arange(count), scatter_of(rows, 3))
    assert len(set(found.tolist())) == count
    assert 0 <= found.min() <= found.max() < rows
    last = scatter(np.array([rows - 1]), scatter_of(rows, 3))
    assert 0 <= last[0] < rows


def test_first_numbers_are_scattered() -> None:
    rows, count = 3_000_000, 40_000 if JIT_ENABLED else 1000
    found = scatter(np.arange(count), scatter_of(rows, 9))
    regions = np.bincount(found * 50 // rows, minlength=50)
    assert abs(deviation(regions, np.full(50, 1 / 50))) < 4
    # Neighbours do not stay neighbours.
    assert (np.abs(np.diff(found)) < rows // 1000).mean() < 0.01


def test_seeds_differ() -> None:
    found = [scatter(np.arange(100), scatter_of(100, seed)).tolist() for seed in range(20)]
    assert len({tuple(each) for each in found}) == 20


@pytest.mark.parametrize("rows", [0, -1, (1 << 40) + 1])
def test_no_rows(rows: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows} must be in"):
        scatter_of(rows, 0)
