"""Searches, against all plans there are."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.placement.support import costs_of, workload_of
from tierstore.dist.plan import Plan, Sharding
from tierstore.plan import TableShape, Workload
from tierstore.plan.placement import Search, expected_demand, predict

RANKS = 2


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(1, 3))
    return workload_of(
        *(
            TableShape(
                name=f"t{number}",
                num_embeddings=draw(st.integers(1, 3000)),
                embedding_dim=draw(st.sampled_from([4, 8, 16])),
                pooling_factor=draw(st.sampled_from([0.5, 1.0, 10.0])),
                exponent=draw(st.sampled_from([0.0, 1.2])),
            )
            for number in range(count)
        )
    )


def shardings(table: TableShape) -> Iterator[Sharding]:
    """All there are over two ranks."""
    yield Sharding("data_parallel", (0, 1))
    for exchange in ("rows", "pooled"):
        yield from (Sharding("table_wise", (rank,), exchange) for rank in range(RANKS))  # type: ignore[arg-type]
        yield Sharding("row_wise", (0, 1), exchange)  # type: ignore[arg-type]
        if table.embedding_dim >= 8:
            yield Sharding("column_wise", (0, 1), exchange)  # type: ignore[arg-type]


def best(workload: Workload, room: float) -> float:
    demand, costs = expected_demand(workload, RANKS), costs_of(RANKS)
    names = [table.name for table in workload.tables]
    plans = (
        Plan(RANKS, dict(zip(names, chosen, strict=True)))
        for chosen in itertools.product(*map(shardings, workload.tables))
    )
    found = (predict(workload, plan, demand, costs) for plan in plans)
    return min(each.seconds for each in found if each.size_bytes.max() <= room)


@settings(max_examples=15, deadline=None)
@given(workload=workloads(), share=st.sampled_from([0.6, 0.8, 2.0]))
def test_plans_fit_and_the_beam_search_is_near_the_best(workload: Workload, share: float) -> None:
    room = share * workload.table_bytes + 64 * len(workload.tables)
    demand, costs = expected_demand(workload, RANKS), costs_of(RANKS)
    search = Search(workload, demand, costs, rank_bytes=room)
    greedy, beam = search.greedy(), search.beam()
    for found in (greedy, beam):
        told = predict(workload, found.plan, demand, costs)
        assert told.seconds == pytest.approx(found.seconds)
        assert told.size_bytes.max() <= room
        assert list(found.plan.tables) == [table.name for table in workload.tables]
    assert beam.seconds <= greedy.seconds
    assert beam.seconds <= 1.1 * best(workload, room)


_ONLY_ROWS = {"pooled": {"groups": 1e6}, "data_parallel": {"groups": 1e6}}


def test_the_beam_search_halves_the_columns_of_the_costliest() -> None:
    """A table whose hot rows are neighbours: ranges of columns alone divide them evenly."""
    workload = workload_of(TableShape(name="hot", num_embeddings=400, embedding_dim=64))
    demand = {"hot": expected_demand(workload, 4)["hot"]._replace(hot_rows=np.eye(1, 4)[0], hot_ids=np.eye(1, 4)[0])}
    found = Search(workload, demand, costs_of(4, other=_ONLY_ROWS)).beam()
    assert found.plan.tables["hot"] == Sharding("column_wise", (0, 1, 2, 3), "rows")


def test_ranks_of_one_host_share_a_table() -> None:
    """Which no rank has room for; each owner more is one bag more to be sent."""
    other = {"rows": {"groups": 1e6}, "data_parallel": {"groups": 1e6}, "pooled": {"bag_columns": 1.0, "served": 0.0}}
    costs = costs_of(4, other=other, local_world_size=2, cores=2)
    tables = (TableShape(name=name, num_embeddings=100, embedding_dim=5) for name in "ab")
    workload = workload_of(*tables)
    found = Search(workload, expected_demand(workload, 4), costs, rank_bytes=0.3 * workload.table_bytes).beam()
    assert {each.sharding_type for each in found.plan.tables.values()} == {"table_row_wise"}
    assert {each.ranks for each in found.plan.tables.values()} == {(0, 1), (2, 3)}


def test_small_tables_are_copied_to_all_ranks() -> None:
    """Where that saves their exchange, and large ones have no room for that."""
    small = [TableShape(name=f"small{number}", num_embeddings=3, embedding_dim=8) for number in range(12)]
    large = [TableShape(name=f"large{number}", num_embeddings=4000, embedding_dim=8) for number in range(2)]
    workload = workload_of(*small, *large, samples=256)
    costs = costs_of(2, other={"rows": {"tables": 1.0}, "pooled": {"groups": 1e6}})
    room = 0.6 * workload.table_bytes
    found = Search(workload, expected_demand(workload, 2), costs, rank_bytes=room).beam().plan.tables
    assert {found[table.name].sharding_type for table in small} == {"data_parallel"}
    assert "data_parallel" not in {found[table.name].sharding_type for table in large}


def test_what_cannot_be_is_told() -> None:
    table = TableShape(name="t", num_embeddings=1000, embedding_dim=8)
    workload = workload_of(table)
    demand = expected_demand(workload, 2)
    with pytest.raises(ValueError, match="more than 2 ranks have room for"):
        Search(workload, demand, costs_of(2), rank_bytes=15_999)
    found = Search(workload, demand, costs_of(2), rank_bytes=16_000).greedy()
    assert found.plan.tables["t"].sharding_type in ("row_wise", "column_wise")
    with pytest.raises(ValueError, match="measure-ranks --optimizer sgd"):
        Search(workload, demand, costs_of(2, optimizer="adam"))
