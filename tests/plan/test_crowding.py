"""Neighbours of a cache's rows, counted against a loop over them."""

import numpy as np
import pytest

from tierstore.plan.accesses import Accesses
from tierstore.plan.crowding import crowding_of
from tierstore.rows import KEY_ROW_BITS, RowLayout

LAYOUT = RowLayout(dim=64, state_dim=1)


def accesses_to(rows: list[int], *, table: int = 0, rate: float = 1.0) -> Accesses:
    keys = np.array(rows, np.int64) | (table << KEY_ROW_BITS)
    return Accesses(keys, np.array([0, len(rows)]), ("a", "b"), rate)


def slow_neighbours(rows: list[int], size: int) -> float:
    newest: list[int] = []
    for row in reversed(rows):
        if row not in newest:
            newest.append(row)
    cached = newest[:size]
    blocks = [row // LAYOUT.rows_per_block for row in cached]
    return sum(blocks.count(block) - 1 for block in blocks) / size


def test_neighbours_are_those_of_the_rows_used_last() -> None:
    rows = np.random.default_rng(0).zipf(1.3, 3000) % 500
    found = crowding_of(accesses_to(rows.tolist()), LAYOUT)
    assert found is not None
    assert found.sizes[-1] == len(set(rows.tolist()))
    for size, neighbours in zip(found.sizes.tolist(), found.neighbours.tolist(), strict=True):
        assert neighbours == pytest.approx(slow_neighbours(rows.tolist(), size))
    assert found.at(1e9) == found.neighbours[-1]


def test_rows_of_other_tables_are_no_neighbours() -> None:
    near, apart = accesses_to([0, 1, 2, 3]), accesses_to([0, 1])
    both = apart._replace(keys=np.append(apart.keys, accesses_to([2, 3], table=1).keys), starts=np.array([0, 4]))
    for accesses, expected in ((near, 3.0), (both, 1.0)):
        found = crowding_of(accesses, LAYOUT)
        assert found is not None
        assert found.at(4) == expected


def test_a_sample_does_not_tell() -> None:
    assert crowding_of(accesses_to([1, 2], rate=0.5), LAYOUT) is None
    assert crowding_of(accesses_to([]), LAYOUT) is None
