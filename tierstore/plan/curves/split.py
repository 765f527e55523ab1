"""A budget, split between tables that have caches of their own: each byte where it brings most hits."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...system.excerpt import excerpt, excerpt_names
from .base import MissRatioCurve

__all__ = ["Split", "shared_hit_rate", "split_by_gain"]

Float64s = NDArray[np.float64]


class Split(NamedTuple):
    """Caches of the tables.

    Attributes:
        rows: of each table's cache.
        size_bytes: of all rows of the caches.
        hit_rate: of all accesses to the tables, by the curves.
        hits_per_byte: what the next bytes would bring, in hits over all the curves' accesses; 0: each table has all.
    """

    rows: dict[str, int]
    size_bytes: int
    hit_rate: float
    hits_per_byte: float


class _Step(NamedTuple):
    """A piece of a concave hull: the cache of a table grows from ``start`` to ``stop`` rows."""

    hits_per_byte: float
    table: str
    start: int
    stop: int


def split_by_gain(curves: Mapping[str, MissRatioCurve], *, row_bytes: Mapping[str, int], budget_bytes: int) -> Split:
    """The split with most hits, but for a rest of the budget that is smaller than one step of one table's curve.

    Tables grow by the steps of their curves' concave hulls, those with most hits a byte first (B. Fox, Discrete
    optimization via marginal analysis, Management Science 13, 1966; for caches H. Stone, J. Turek, J. Wolf, Optimal
    partitioning of cache memory, IEEE Transactions on Computers 41, 1992). The hull steps over flat parts, after which
    a steep one pays.

    Args:
        curves: by table.
        row_bytes: of each of these tables; what a row takes in the cache, overhead included.
        budget_bytes: for all.

    Raises:
        ValueError: no curve; a table's ``row_bytes`` are missing or no bytes; the budget is negative.
    """
    _check(curves, row_bytes, budget_bytes)
    left, hits_per_byte = budget_bytes, 0.0
    rows = dict.fromkeys(curves, 0)
    for step in sorted(_steps(curves, row_bytes)):
        size_bytes = row_bytes[step.table]
        rows[step.table] = min(step.stop, step.start + left // size_bytes)
        left -= (rows[step.table] - step.start) * size_bytes
        if rows[step.table] < step.stop:
            hits_per_byte = -step.hits_per_byte
            break
    return Split(rows, budget_bytes - left, _hit_rate(curves, rows), hits_per_byte)


def shared_hit_rate(curve: MissRatioCurve, *, row_bytes: int, budget_bytes: int) -> float:
    """What one cache for all rows hits with the same budget; ``curve`` is that of all tables, whose rows are alike.

    Raises:
        ValueError: ``row_bytes`` are no bytes.
    """
    if row_bytes < 1:
        raise ValueError(f"row_bytes={excerpt(row_bytes)}: expected at least 1")
    return curve.hit_rate(budget_bytes // row_bytes)


def _check(curves: Mapping[str, MissRatioCurve], row_bytes: Mapping[str, int], budget_bytes: int) -> None:
    if not curves:
        raise ValueError("there is no curve to split a budget by")
    lacking = [name for name in curves if row_bytes.get(name, 0) < 1]
    if lacking:
        raise ValueError(
            f"row_bytes: expected at least 1 for each table with a curve; not so of {excerpt_names(lacking)}"
        )
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes={excerpt(budget_bytes)}: a budget is not negative")


def _steps(curves: Mapping[str, MissRatioCurve], row_bytes: Mapping[str, int]) -> list[_Step]:
    """Of all hulls; with less than no hits a byte, so that the best sort first."""
    found = []
    for name, curve in curves.items():
        sizes = np.append(0, curve.sizes)
        hits = np.append(0.0, (1 - curve.miss_ratios) * curve.num_accesses)
        hull = _concave_hull(sizes.astype(np.float64), hits)
        for low, high in itertools.pairwise(hull):
            gain = float(hits[high] - hits[low]) / (int(sizes[high] - sizes[low]) * row_bytes[name])
            if gain > 0:
                found.append(_Step(-gain, name, int(sizes[low]), int(sizes[high])))
    return found


def _concave_hull(sizes: Float64s, hits: Float64s) -> list[int]:
    """Indexes of the points of the upper hull, ascending (A. Andrew's monotone chain, 1979)."""
    hull: list[int] = []
    for point in range(len(sizes)):
        while len(hull) > 1:
            low, middle = hull[-2], hull[-1]
            rise = (hits[middle] - hits[low]) * (sizes[point] - sizes[low])
            if rise > (hits[point] - hits[low]) * (sizes[middle] - sizes[low]):
                break
            hull.pop()
        hull.append(point)
    return hull


def _hit_rate(curves: Mapping[str, MissRatioCurve], rows: Mapping[str, int]) -> float:
    accesses = sum(curve.num_accesses for curve in curves.values())
    hits = sum(curve.hit_rate(rows[name]) * curve.num_accesses for name, curve in curves.items())
    return hits / accesses if accesses else 0.0
