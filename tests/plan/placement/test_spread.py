"""Greedy assignment, against every assignment there is."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.plan import TableShape, Workload
from tierstore.plan.placement.spread import longest_first, spread

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
def test_is_within_grahams_bound(costs: np.ndarray) -> None:
    best = least_possible(costs)
    assert best is not None
    sizes = np.ones(len(costs), np.int64)
    first = longest_first(costs, sizes, DEVICES, ROOMY)
    assert first is not None
    # In whole numbers, as costs are: 4/3 - 1/(3 * 3) is 11/9.
    assert 9 * largest(first, costs) <= 11 * best


@settings(max_examples=60, deadline=None)
@given(whole_costs, st.integers(1, 60), st.randoms(use_true_random=False))
def test_no_device_gets_more_than_it_has_room_for(costs: np.ndarray, budget: int, random: object) -> None:
    sizes = np.array([random.randint(1, 20) for _ in costs], np.int64)  # type: ignore[attr-defined]
    first = longest_first(costs, sizes, DEVICES, budget)
    if first is None:
        return
    best = least_possible(costs, sizes, budget)
    assert best is not None
    assert max(sizes[first == device].sum() for device in range(DEVICES)) <= budget
    assert best <= largest(first, costs)


def test_what_has_no_room_on_the_least_busy_device_goes_to_the_next() -> None:
    costs, sizes = np.array([10.0, 9.0, 8.0]), np.array([1, 5, 5])
    found = longest_first(costs, sizes, 2, 6)
    assert found is not None
    assert found.tolist() == [0, 1, 0]
    assert longest_first(costs, sizes, 2, 5) is None


def workload_of(*tables: tuple[int, int, float]) -> Workload:
    """Of (rows, columns, pooling factor)."""
    shapes = tuple(
        TableShape(name=f"t{index}", num_embeddings=rows, embedding_dim=dim, pooling_factor=float(ids))
        for index, (rows, dim, ids) in enumerate(tables)
    )
    return Workload(name="w", tables=shapes, batch_samples=128, optimizer="rowwise_adagrad")


table_shapes = st.tuples(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 50))


@settings(max_examples=150, deadline=None)
@given(st.lists(table_shapes, min_size=1, max_size=9), st.integers(1, 5), st.floats(1.0, 3.0))
def test_every_row_is_placed_once_within_the_budget(
    tables: list[tuple[int, int, float]], places: int, slack: float
) -> None:
    """Of each place less than the widest row stays free where it is needed."""
    workload = workload_of(*tables)
    widest = max(workload.layout(table).row_bytes for table in workload.tables)
    budget = int(slack * workload.table_bytes / places) + widest + 1
    found = spread(workload, range(len(tables)), places, budget)
    assert found is not None
    assert len(found) == places
    rows = sorted(piece for pieces in found for piece in pieces)
    for index, (num_rows, _, _) in enumerate(tables):
        own = [piece for piece in rows if piece.number == index]
        ends = [0, *(piece.first_row + piece.num_rows for piece in own)]
        assert [piece.first_row for piece in own] == ends[:-1]
        assert ends[-1] == num_rows
    assert max(sum(piece.size_bytes for piece in pieces) for pieces in found) <= budget
    assert spread(workload, range(len(tables)), places, budget) == found
    assert spread(workload, range(len(tables)), places, workload.table_bytes // places // 2) is None or places == 1


def test_a_table_that_costs_more_than_the_mean_is_split() -> None:
    workload = workload_of((1000, 64, 100), *[(1000, 64, 1)] * 3)
    found = spread(workload, range(4), 4, 1 << 40)
    assert found is not None
    loads = [sum(piece.looked_up_bytes(128) for piece in pieces) for pieces in found]
    assert max(loads) < 1.01 * sum(loads) / 4


def test_memory_is_filled_to_the_last_row() -> None:
    """Whole tables leave gaps; rows fill them."""
    workload = workload_of(*[(600, 16, 1)] * 3)
    budget = 900 * workload.layout(workload.tables[0]).row_bytes
    found = spread(workload, range(3), 2, budget)
    assert found is not None
    assert [sum(piece.size_bytes for piece in pieces) for pieces in found] == [budget, budget]
