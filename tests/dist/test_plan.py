"""Sharding plans: every value has its owners, files say what was planned, wrong ones are refused."""

import json
import random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore import optim
from tierstore.dist import Plan, Sharding
from tierstore.dist.owners import local_config
from tierstore.dist.plan import ShardingType


def drawn_sharding(draw: random.Random, size: int) -> Sharding:
    """Over some of so many ranks."""
    kind = draw.choice(get_args(ShardingType))
    ranks = draw.sample(range(size), draw.randint(1, size))
    if kind == "data_parallel":
        return Sharding.checked(kind, range(size), "rows", size)
    divisors = [count for count in range(1, len(ranks) + 1) if len(ranks) % count == 0]
    ranges = draw.choice(divisors) if kind == "grid_shard" else 1
    exchange = draw.choice(["rows", "pooled"])
    return Sharding.checked(kind, ranks[:1] if kind == "table_wise" else ranks, exchange, size, ranges)


@given(draw=st.randoms(use_true_random=False), size=st.integers(1, 6), num_rows=st.integers(1, 40))
def test_every_value_has_one_owner_or_all_and_a_file_says_so(draw, size, num_rows, tmp_path_factory):
    tables = {name: drawn_sharding(draw, size) for name in ("a", "b", "ü\n")}
    for own in tables.values():
        dim = draw.randint(1, 4) * len(own.ranks)
        owners = np.zeros((num_rows, dim), int)
        for shard in own.shards(num_rows, dim):
            assert shard.num_rows > 0
            rows = slice(shard.first_row, shard.first_row + shard.num_rows)
            owners[rows, shard.first_column : shard.first_column + shard.num_columns] += 1
        assert (owners == (size if own.sharding_type == "data_parallel" else 1)).all()
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    Plan(size, tables).save(path)
    assert Plan.load(path) == Plan(size, tables)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (None, "is no JSON"),
        ({"world_size": 0}, "world_size=0"),
        ({"tables": []}, "is no plan"),
        ({"tables": {"t": "row_wise"}}, "table 't': 'row_wise': a sharding is a table of"),
        ({"sharding_type": "row_wise"}, "table 't'.*sharding_type, ranks"),
        ({"sharding_type": "rowwise", "ranks": [0]}, "table 't'.*'rowwise'"),
        ({"sharding_type": "table_wise", "ranks": [0, 1]}, "one rank"),
        ({"sharding_type": "row_wise", "ranks": [1, 1]}, "distinct"),
        ({"sharding_type": "data_parallel", "ranks": [1]}, "on all 2 ranks"),
        ({"sharding_type": "row_wise", "ranks": [0, 1], "column_ranges": 2}, "column_ranges=2: it is of grid_shard"),
    ],
)
def test_what_is_no_plan_is_refused(fields, said, tmp_path):
    path = tmp_path / "plan.json"
    known = {"world_size": 2, "tables": {"t": fields}} if fields and "sharding_type" in fields else fields or {}
    path.write_text("{" if fields is None else json.dumps({"world_size": 2, "tables": {}} | known))
    with pytest.raises((ValueError, TypeError), match=said):
        Plan.load(path)


@pytest.mark.parametrize(
    ("fields", "sharding", "said"),
    [
        ({"embedding_dim": 9}, Sharding("column_wise", (0, 1)), "9 columns cannot be divided"),
        ({"pooling": "max"}, Sharding("row_wise", (0, 1), "pooled"), "cannot pool"),
        ({"dtype": "bfloat16", "rounding": "stochastic"}, Sharding("column_wise", (0, 1)), "stochastic"),
        ({"optimizer": optim.RowWiseAdagrad()}, Sharding("column_wise", (0, 1), "pooled"), "no rank has"),
        ({"optimizer": optim.RowWiseAdagrad(weight_decay=0.1)}, Sharding("column_wise", (0, 1)), "weight_decay=0.1"),
    ],
)
def test_tables_that_cannot_be_sharded_so_are_refused(fields, sharding, said):
    config = tierstore.TableConfig(**({"name": "t", "num_embeddings": 9, "embedding_dim": 8} | fields))
    with pytest.raises(ValueError, match=said):
        local_config(config, sharding, 0)
