"""Shard plans: every row and column once, bytes that add up, bounds, and what is said where tables do not fit."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.plan import TableShape, Workload
from tierstore.plan.placement import LinearCost, ShardPlan, shard
from tierstore.plan.placement.shapes import Piece, Shapes

COST = LinearCost(bytes_per_s=1e9, table_s=1e-6, link_bytes_per_s=1e10)
KINDS = ("table", "row", "column")


def workload_of(*tables: tuple[int, int, float], optimizer: str = "sgd", batch: int = 128) -> Workload:
    """Of (rows, columns, pooling factor)."""
    shapes = tuple(
        TableShape(name=f"t{index}", num_embeddings=rows, embedding_dim=dim, pooling_factor=float(ids))
        for index, (rows, dim, ids) in enumerate(tables)
    )
    return Workload(name="w", tables=shapes, batch_samples=batch, optimizer=optimizer)  # type: ignore[arg-type]


def assert_whole(plan: ShardPlan, workload: Workload) -> None:
    """Each row and column of each table once: no two parts overlap, and their areas add up."""
    for table in workload.tables:
        own = [part for part in plan.parts if part.table == table.name]
        area = sum(part.num_rows * part.num_columns for part in own)
        assert area == table.num_embeddings * table.embedding_dim
        for part in own:
            assert part.num_rows > 0
            assert part.num_columns > 0
            assert 0 <= part.first_row <= part.first_row + part.num_rows <= table.num_embeddings
            assert 0 <= part.first_column <= part.first_column + part.num_columns <= table.embedding_dim
        for one, other in itertools.combinations(own, 2):
            rows = min(one.first_row + one.num_rows, other.first_row + other.num_rows) - max(
                one.first_row, other.first_row
            )
            columns = min(one.first_column + one.num_columns, other.first_column + other.num_columns) - max(
                one.first_column, other.first_column
            )
            assert rows <= 0 or columns <= 0


def assert_adds_up(plan: ShardPlan, workload: Workload) -> None:
    """Sizes as the store's layout of so many columns says; sums by device; no device too full."""
    tables = {table.name: table for table in workload.tables}
    for device in range(plan.num_devices):
        own = [part for part in plan.parts if part.device == device]
        sizes = []
        for part in own:
            shape = TableShape(name="x", num_embeddings=part.num_rows, embedding_dim=part.num_columns)
            sizes.append(part.num_rows * workload.layout(shape).row_bytes)
            assert part.size_bytes == sizes[-1]
            lookups = workload.batch_samples * tables[part.table].pooling_factor
            ids = lookups * part.num_rows / tables[part.table].num_embeddings
            moved = ids * workload.layout(shape).weight_words * 8 / 1e9
            link = (8 * ids + 4 * part.num_columns * workload.batch_samples) / 1e10
            assert part.cost_s == pytest.approx(moved + 1e-6 + link, rel=1e-12)
        assert plan.device_bytes[device] == sum(sizes) <= plan.budget_bytes
        assert plan.device_costs_s[device] == pytest.approx(sum(part.cost_s for part in own), rel=1e-12)
    assert plan.lower_bound_s <= plan.cost_s * (1 + 1e-12)
    assert plan.balance == pytest.approx(plan.device_costs_s.max() / plan.device_costs_s.mean())


table_shapes = st.tuples(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 50))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(table_shapes, min_size=1, max_size=9),
    st.integers(1, 5),
    st.floats(0.9, 3.0),
    st.sets(st.sampled_from(KINDS), min_size=1),
    st.sampled_from(["none", "sgd", "rowwise_adagrad", "adam"]),
)
def test_every_row_and_column_is_placed_once(
    tables: list[tuple[int, int, float]], devices: int, slack: float, allow: set[str], optimizer: str
) -> None:
    workload = workload_of(*tables, optimizer=optimizer)
    budget = int(slack * workload.table_bytes / devices) + 1
    asked = {"num_devices": devices, "cost_model": COST, "allow": sorted(allow)}
    try:
        plan = shard(workload, budget_bytes=budget, **asked)  # type: ignore[arg-type]
    except ValueError as error:
        budget = int(re.findall(r"devices of ([\d,]+) bytes", str(error))[0].replace(",", ""))
        plan = shard(workload, budget_bytes=budget, **asked)  # type: ignore[arg-type]
    assert_whole(plan, workload)
    assert_adds_up(plan, workload)


def test_whole_tables_are_near_the_best_of_all_assignments() -> None:
    generator = np.random.default_rng(5)
    for _ in range(12):
        tables = [(1000, 16, int(ids)) for ids in generator.integers(1, 60, 7)]
        workload = workload_of(*tables)
        plan = shard(workload, num_devices=3, budget_bytes=1 << 40, cost_model=COST, allow=("table",))
        costs = np.array([part.cost_s for part in plan.parts])
        ways = np.array(list(itertools.product(range(3), repeat=7)))
        best = np.stack([((ways == device) * costs).sum(1) for device in range(3)], axis=1).max(1).min()
        assert best * (1 - 1e-12) <= plan.cost_s <= best * (4 / 3 - 1 / 9)
        assert plan.lower_bound_s <= best * (1 + 1e-12)


def test_a_table_larger_than_a_device_is_split() -> None:
    workload = workload_of((1000, 16, 1), (100, 16, 1))
    plan = shard(workload, num_devices=4, budget_bytes=20_000, cost_model=COST, allow=("table", "row"))
    (split,) = (each for each in plan.split_tables if each.table == "t0")
    assert split == ("t0", "row", 4, "larger than a device")
    assert {part.num_rows for part in plan.parts if part.table == "t0"} == {250}


def test_a_table_that_costs_more_than_the_mean_is_split() -> None:
    workload = workload_of((1000, 64, 100), *[(1000, 64, 1)] * 3)
    asked = {"num_devices": 4, "budget_bytes": 1 << 40, "cost_model": COST}
    whole = shard(workload, **asked, allow=("table",))
    for kind in ("row", "column"):
        plan = shard(workload, **asked, allow=("table", kind))  # type: ignore[list-item]
        assert plan.cost_s < whole.cost_s / 2
        assert [(each.table, each.kind, each.why) for each in plan.split_tables] == [
            ("t0", kind, "costs more than the mean device")
        ]
    assert not whole.split_tables


def test_a_split_that_costs_more_is_not_made() -> None:
    """Partial sums of all bags go over a slow link."""
    asked = {"num_devices": 2, "budget_bytes": 1 << 40, "allow": ("table", "row")}
    slow = LinearCost(bytes_per_s=1e12, link_bytes_per_s=1e3)
    workload = workload_of((1000, 64, 2), (1000, 64, 1))
    assert not shard(workload, **asked, cost_model=slow).split_tables
    assert shard(workload, **asked, cost_model=LinearCost(bytes_per_s=1e3)).split_tables


def test_cost_is_split_by_rows_or_columns_whichever_is_cheaper() -> None:
    """Ids go to each part that has columns of their rows, partial sums come from each that has rows: with few ids a bag
    columns are cheaper, with many rows."""
    asked = {"num_devices": 4, "budget_bytes": 30_000, "cost_model": LinearCost(bytes_per_s=1e15, link_bytes_per_s=1e6)}
    for ids, kind in ((2, "column"), (200, "row")):
        (split,) = shard(workload_of((1000, 16, ids)), **asked, allow=("row", "column")).split_tables
        assert split.kind == kind


@pytest.mark.parametrize("allow", [("table",), ("table", "row"), ("table", "column"), KINDS])
def test_what_is_said_to_do_does(allow: tuple[str, ...]) -> None:
    workload = workload_of(*[(1000, 16, 1), (700, 32, 2), (500, 8, 3)] * 2)
    asked = {"cost_model": COST, "allow": allow}
    with pytest.raises(ValueError, match="such devices would do") as caught:
        shard(workload, num_devices=2, budget_bytes=90_000, **asked)  # type: ignore[arg-type]
    text = str(caught.value)
    devices = int(re.findall(r"(\d+) such devices", text)[0])
    size = int(re.findall(r"2 devices of ([\d,]+) bytes", text)[0].replace(",", ""))
    shard(workload, num_devices=devices, budget_bytes=90_000, **asked)  # type: ignore[arg-type]
    shard(workload, num_devices=2, budget_bytes=size, **asked)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        shard(workload, num_devices=devices - 1, budget_bytes=90_000, **asked)  # type: ignore[arg-type]


def test_a_table_that_no_number_of_devices_can_share() -> None:
    workload = workload_of((1000, 16, 1), (10, 16, 1))
    with pytest.raises(ValueError, match=r"table 't0' alone takes 62.5 KiB.*dividing tables by rows"):
        shard(workload, num_devices=2, budget_bytes=50_000, cost_model=COST, allow=("table",))


def test_memory_is_filled_to_the_last_row() -> None:
    """Whole tables leave gaps; rows fill them."""
    workload = workload_of(*[(600, 16, 1)] * 3)
    plan = shard(workload, num_devices=2, budget_bytes=900 * 64, cost_model=COST, allow=("table", "row"))
    assert plan.device_bytes.tolist() == [900 * 64] * 2
    assert [each.why for each in plan.split_tables] == ["to fill what is free"]


def test_tables_that_may_not_be_whole_are_split_over_all() -> None:
    workload = workload_of((1000, 16, 1), (2, 16, 1))
    plan = shard(workload, num_devices=4, budget_bytes=1 << 30, cost_model=COST, allow=("row",))
    assert [(each.parts, each.why) for each in plan.split_tables] == [
        (4, "no table may be whole"),
        (2, "no table may be whole"),
    ]


def test_tables_that_nobody_looks_up_cost_nothing() -> None:
    plan = shard(workload_of((10, 4, 0), (10, 4, 0)), num_devices=2, budget_bytes=1 << 20, cost_model=LinearCost())
    assert plan.cost_s >= 0
    assert plan.balance >= 1
    assert plan.gap >= 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_devices": 0}, "num_devices"),
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"allow": ()}, "allow is empty"),
        ({"allow": ("rows",)}, "table, row, column"),
    ],
)
def test_wrong_arguments(change: dict[str, object], match: str) -> None:
    given = {"num_devices": 2, "budget_bytes": 1 << 30, "cost_model": COST} | change
    with pytest.raises(ValueError, match=match):
        shard(workload_of((10, 4, 1)), **given)  # type: ignore[arg-type]


def test_plans_are_the_same_each_time_and_json() -> None:
    workload = workload_of(*[(1000 + 7 * at, 16, at % 9) for at in range(30)])
    plans = [shard(workload, num_devices=7, budget_bytes=1 << 30, cost_model=COST).to_dict() for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0]["parts"][0]["table"] == "t0"


def test_column_pieces_have_state_of_their_own() -> None:
    """A row of 8 float32 with one float32 of state takes 40 bytes, and 48 in two halves."""
    shapes = Shapes(workload_of((10, 8, 1), optimizer="rowwise_adagrad"))
    (piece,) = shapes.whole()
    assert shapes.size_bytes(piece) == 400
    assert [shapes.size_bytes(half) for half in piece.by_columns(2)] == [240, 240]
    assert piece.by_columns(9) == [Piece(0, 0, 10, 0, 4), Piece(0, 0, 10, 4, 4)]
    assert [each.num_rows for each in piece.by_rows(3)] == [3, 3, 4]
