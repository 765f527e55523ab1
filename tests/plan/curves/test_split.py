"""Budgets split between tables, against all splits there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.plan import MissRatioCurve
from tierstore.plan.curves import Split, shared_hit_rate, split_by_gain

NAMES = ("a", "b", "c")


def curve_of_gains(gains: list[int], num_accesses: int = 100) -> MissRatioCurve:
    """The k-th row adds ``gains[k]`` hits."""
    hits = np.cumsum(gains)
    return MissRatioCurve(
        policy="lru",
        sizes=np.arange(1, len(gains) + 1),
        miss_ratios=1 - hits / num_accesses,
        num_accesses=num_accesses,
        num_rows=len(gains),
    )


def best_hits(curves: dict[str, MissRatioCurve], row_bytes: dict[str, int], budget: int) -> float:
    """Of every split that the budget allows."""
    choices = [range(curve.num_rows + 1) for curve in curves.values()]
    return max(
        sum(curves[name].hit_rate(rows) * curves[name].num_accesses for name, rows in zip(curves, split, strict=True))
        for split in itertools.product(*choices)
        if sum(row_bytes[name] * rows for name, rows in zip(curves, split, strict=True)) <= budget
    )


def hits_of(split: Split, curves: dict[str, MissRatioCurve]) -> float:
    return split.hit_rate * sum(curve.num_accesses for curve in curves.values())


gains = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(tables=st.lists(gains, min_size=1, max_size=3), budget=st.integers(0, 16))
def test_concave_curves_of_like_rows_are_split_as_well_as_can_be(tables: list[list[int]], budget: int) -> None:
    curves = {name: curve_of_gains(sorted(each)[::-1]) for name, each in zip(NAMES, tables, strict=False)}
    row_bytes = dict.fromkeys(curves, 1)
    split = split_by_gain(curves, row_bytes=row_bytes, budget_bytes=budget)
    assert hits_of(split, curves) == pytest.approx(best_hits(curves, row_bytes, budget))
    assert split.size_bytes == sum(split.rows.values()) <= budget


@given(
    tables=st.lists(st.tuples(gains, st.integers(1, 4), st.integers(50, 200)), min_size=1, max_size=3),
    budget=st.integers(0, 40),
)
def test_any_curves_are_split_but_for_one_step(tables: list[tuple[list[int], int, int]], budget: int) -> None:
    """The budget that the greedy split leaves, or spends on a part of a step, is less than a step: no split of the
    budget has more hits than this one and that step."""
    named = dict(zip(NAMES, tables, strict=False))
    curves = {name: curve_of_gains(each, accesses) for name, (each, _, accesses) in named.items()}
    row_bytes = {name: size for name, (_, size, _) in named.items()}
    split = split_by_gain(curves, row_bytes=row_bytes, budget_bytes=budget)
    assert split.size_bytes == sum(row_bytes[name] * rows for name, rows in split.rows.items()) <= budget
    best = best_hits(curves, row_bytes, budget)
    step = max(sum(each) for each, _, _ in tables)
    assert best - step - 1e-9 <= hits_of(split, curves) <= best + 1e-9
    if split.hits_per_byte == 0:
        assert hits_of(split, curves) == pytest.approx(sum(sum(each) for each, _, _ in tables))


def test_a_flat_part_is_stepped_over_where_what_follows_pays() -> None:
    curves = {"loop": curve_of_gains([0, 0, 0, 40]), "steady": curve_of_gains([9, 9, 9, 9])}
    split = split_by_gain(curves, row_bytes={"loop": 10, "steady": 10}, budget_bytes=50)
    assert split.rows == {"loop": 4, "steady": 1}
    assert split.hit_rate == pytest.approx(49 / 200)
    assert split.hits_per_byte == pytest.approx(0.9)


def test_wide_rows_give_way_to_narrow_ones() -> None:
    curves = {"wide": curve_of_gains([10, 10]), "narrow": curve_of_gains([6, 6])}
    split = split_by_gain(curves, row_bytes={"wide": 200, "narrow": 100}, budget_bytes=399)
    assert split == Split({"wide": 0, "narrow": 2}, 200, pytest.approx(12 / 200), pytest.approx(0.05))


def test_one_cache_for_all_has_the_shared_curves_hit_rate() -> None:
    curve = curve_of_gains([10, 20, 30])
    assert shared_hit_rate(curve, row_bytes=100, budget_bytes=299) == pytest.approx(0.3)
    assert shared_hit_rate(curve, row_bytes=100, budget_bytes=99) == 0


def test_what_cannot_be_is_said() -> None:
    curves = {"a": curve_of_gains([1]), "b": curve_of_gains([2])}
    with pytest.raises(ValueError, match="there is no curve"):
        split_by_gain({}, row_bytes={}, budget_bytes=1)
    with pytest.raises(ValueError, match=r"row_bytes: expected at least 1 .* not so of b"):
        split_by_gain(curves, row_bytes={"a": 1}, budget_bytes=1)
    with pytest.raises(ValueError, match="budget_bytes=-1"):
        split_by_gain(curves, row_bytes={"a": 1, "b": 1}, budget_bytes=-1)
    with pytest.raises(ValueError, match="row_bytes=0"):
        shared_hit_rate(curves["a"], row_bytes=0, budget_bytes=1)
