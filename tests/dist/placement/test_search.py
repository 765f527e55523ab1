"""Searches, against all plans there are."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.placement.support import costs_of, drawn, table
from tierstore import TableConfig
from tierstore.dist import Plan, Sharding
from tierstore.dist.placement import Demand, Search, predict

RANKS = 2


def size_bytes(tables: list[TableConfig]) -> int:
    return sum(each.size_bytes(4096) for each in tables)


def shardings(dim: int) -> Iterator[Sharding]:
    """All there are over two ranks."""
    yield Sharding("data_parallel", (0, 1))
    for exchange in ("rows", "pooled"):
        yield from (Sharding("table_wise", (rank,), exchange) for rank in range(RANKS))  # type: ignore[arg-type]
        yield Sharding("row_wise", (0, 1), exchange)  # type: ignore[arg-type]
        if dim >= 8:
            yield Sharding("column_wise", (0, 1), exchange)  # type: ignore[arg-type]


def best_of_all(tables: list[TableConfig], demand: Demand, limit: float) -> float:
    names = [each.name for each in tables]
    plans = itertools.product(*(shardings(each.embedding_dim) for each in tables))
    found = (predict(tables, Plan(RANKS, dict(zip(names, own, strict=True))), demand, costs_of(RANKS)) for own in plans)
    return min(each.seconds for each in found if each.size_bytes.max() <= limit)


shapes = st.tuples(st.integers(1, 3000), st.sampled_from([4, 8, 16]))


@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(shapes, min_size=1, max_size=3), share=st.sampled_from([0.6, 0.8, 2.0]))
def test_plans_fit_and_are_near_the_best(shapes: list[tuple[int, int]], share: float) -> None:
    tables = [table(f"t{number}", *shape) for number, shape in enumerate(shapes)]
    demand, limit = drawn(tables, RANKS), share * size_bytes(tables) + 64 * len(tables)
    found = Search(tables, demand, costs_of(RANKS), rank_bytes=limit).best()
    assert found.size_bytes.max() <= limit
    assert list(found.plan.tables) == [each.name for each in tables]
    assert found.seconds == predict(tables, found.plan, demand, costs_of(RANKS)).seconds
    assert found.seconds <= 1.1 * best_of_all(tables, demand, limit)


def test_what_cannot_be_is_refused() -> None:
    tables = [table("t", 1000)]
    demand = drawn(tables, 2)
    with pytest.raises(ValueError, match="raise the limit"):
        Search(tables, demand, costs_of(2), rank_bytes=15_999).best()
    found = Search(tables, demand, costs_of(2), rank_bytes=16_000).best()
    assert found.plan.tables["t"].sharding_type in ("row_wise", "column_wise")
    with pytest.raises(ValueError, match="shard measure --optimizer sgd"):
        Search(tables, demand, costs_of(2, optimizer="adam"))
