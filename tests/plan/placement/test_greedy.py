"""Greedy assignment, against every assignment there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.plan.placement.greedy import improve, longest_first, lower_bound

DEVICES = 3
ROOMY = 1 << 40


def all_assignments(things: int, devices: int) -> np.ndarray:
    return np.array(list(itertools.product(range(devices), repeat=things)))


def largest(devices: np.ndarray, costs: np.ndarray) -> float:
    return max(float(costs[devices == device].sum()) for device in range(DEVICES))


def least_possible(costs: np.ndarray, sizes: np.ndarray | None = None, budget: int = 0) -> float | None:
    """The least largest cost of all assignments; None if none has room."""
    found = all_assignments(len(costs), DEVICES)
    loads = np.stack([((found == device) * costs).sum(1) for device in range(DEVICES)], axis=1).max(1)
    if sizes is not None:
        used = np.stack([((found == device) * sizes).sum(1) for device in range(DEVICES)], axis=1).max(1)
        loads = loads[used <= budget]
    return float(loads.min()) if len(loads) else None


whole_costs = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(lambda costs: np.array(costs, np.float64))


@settings(max_examples=60, deadline=None)
@given(whole_costs)
def test_is_within_grahams_bound_and_moves_only_help(costs: np.ndarray) -> None:
    best = least_possible(costs)
    assert best is not None
    sizes = np.ones(len(costs), np.int64)
    first = longest_first(costs, sizes, DEVICES, ROOMY)
    assert first is not None
    # In whole numbers, as costs are: 4/3 - 1/(3 * 3) is 11/9.
    assert 9 * largest(first, costs) <= 11 * best
    better = improve(first, costs, sizes, DEVICES, ROOMY)
    assert best <= largest(better, costs) <= largest(first, costs)
    assert lower_bound(costs, DEVICES) <= best


def test_grahams_worst_case_is_met_and_then_mended() -> None:
    costs = np.array([5, 5, 4, 4, 3, 3, 3], np.float64)
    sizes = np.ones(7, np.int64)
    first = longest_first(costs, sizes, DEVICES, ROOMY)
    assert first is not None
    assert largest(first, costs) == 11
    assert least_possible(costs) == 9
    assert largest(improve(first, costs, sizes, DEVICES, ROOMY), costs) < 11


@settings(max_examples=60, deadline=None)
@given(whole_costs, st.integers(1, 60), st.randoms(use_true_random=False))
def test_no_device_gets_more_than_it_has_room_for(costs: np.ndarray, budget: int, random: object) -> None:
    sizes = np.array([random.randint(1, 20) for _ in costs], np.int64)  # type: ignore[attr-defined]
    first = longest_first(costs, sizes, DEVICES, budget)
    if first is None:
        return
    best = least_possible(costs, sizes, budget)
    assert best is not None
    for found in (first, improve(first, costs, sizes, DEVICES, budget)):
        assert max(sizes[found == device].sum() for device in range(DEVICES)) <= budget
        assert best <= largest(found, costs)


def test_what_has_no_room_on_the_least_busy_device_goes_to_the_next() -> None:
    costs, sizes = np.array([10.0, 9.0, 8.0]), np.array([1, 5, 5])
    found = longest_first(costs, sizes, 2, 6)
    assert found is not None
    assert found.tolist() == [0, 1, 0]
    assert longest_first(costs, sizes, 2, 5) is None


def test_a_swap_is_found_where_no_move_helps() -> None:
    costs, sizes = np.array([10.0, 8.0, 9.0, 6.0]), np.ones(4, np.int64)
    devices = improve(np.array([0, 0, 1, 1]), costs, sizes, 2, ROOMY)
    assert max(costs[devices == device].sum() for device in range(2)) == 17


def test_a_swap_needs_room_on_both_sides() -> None:
    costs, sizes = np.array([10.0, 8.0, 9.0, 6.0]), np.array([1, 9, 1, 1])
    devices = np.array([0, 0, 1, 1])
    # 8 for 6 would be best, but 9 bytes do not go where 2 are; 10 for 9 takes one byte for one.
    assert improve(devices, costs, sizes, 2, 10).tolist() == [1, 0, 0, 1]
    assert improve(devices, costs, np.array([9, 9, 1, 1]), 2, 9).tolist() == devices.tolist()


@pytest.mark.parametrize(("costs", "bound"), [([4.0, 4, 4, 1], 5), ([9.0, 1, 1], 9), ([3.0, 3, 3, 3, 3, 3], 6)])
def test_lower_bound_by_hand(costs: list[float], bound: float) -> None:
    """One thing more than devices: two share one. A large one. The mean."""
    assert lower_bound(np.array(costs), DEVICES) == bound
