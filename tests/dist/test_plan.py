"""Sharding plans: every value has its owners, files say what was planned, TorchRec's plans come in, wrong ones not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore import optim
from tierstore.dist import Plan, Sharding
from tierstore.dist.plan import ShardingType
from tierstore.dist.table import local_config


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, Sharding]:
    size = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(get_args(ShardingType)))
    ranks = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    if kind == "data_parallel":
        ranks = list(range(size))
    exchange = "rows" if kind == "data_parallel" else draw(st.sampled_from(["rows", "pooled"]))
    divisors = [count for count in range(1, len(ranks) + 1) if len(ranks) % count == 0]
    ranges = draw(st.sampled_from(divisors)) if kind == "grid_shard" else 1
    return size, Sharding.checked(kind, ranks[:1] if kind == "table_wise" else ranks, exchange, size, ranges)


@given(sharding=shardings(), num_rows=st.integers(1, 40), width=st.integers(1, 4))
def test_every_value_has_one_owner_or_all(sharding: tuple[int, Sharding], num_rows: int, width: int) -> None:
    size, own = sharding
    dim = width * len(own.ranks)
    owners = np.zeros((num_rows, dim), int)
    for shard in own.shards(num_rows, dim):
        assert shard.num_rows > 0
        owners[
            shard.first_row : shard.first_row + shard.num_rows,
            shard.first_column : shard.first_column + shard.num_columns,
        ] += 1
    assert (owners == (size if own.sharding_type == "data_parallel" else 1)).all()
    assert Sharding.from_json(json.loads(json.dumps(own.to_json())), size) == own


@given(tables=st.dictionaries(st.text(min_size=1), shardings().map(lambda pair: pair[1])))
def test_a_file_says_what_was_planned(tables: dict[str, Sharding], tmp_path_factory: pytest.TempPathFactory) -> None:
    size = 6
    tables = {name: each for name, each in tables.items() if each.sharding_type != "data_parallel"}
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    Plan(size, tables).save(path)
    assert Plan.load(path) == Plan(size, tables)


def of_torchrec(**tables: tuple[str, list[int]]) -> dict[str, Any]:
    return {name: SimpleNamespace(sharding_type=kind, ranks=ranks) for name, (kind, ranks) in tables.items()}


def test_plans_of_torchrec_come_in() -> None:
    one = of_torchrec(a=("row_wise", [0, 1]), b=("data_parallel", [0]))
    other = of_torchrec(c=("column_wise", [1, 0]), d=("table_column_wise", [0, 1]), e=("grid_shard", [0, 1]))
    offsets = [(0, 0), (0, 8)]
    other["e"].sharding_spec = SimpleNamespace(shards=[SimpleNamespace(shard_offsets=each) for each in offsets])
    plan = Plan.from_torchrec(SimpleNamespace(plan={"model.one": one, "model.other": other}), 2)
    assert plan.tables == {
        "a": Sharding("row_wise", (0, 1), "pooled"),
        "b": Sharding("data_parallel", (0, 1)),
        "c": Sharding("column_wise", (1, 0), "rows"),
        "d": Sharding("table_column_wise", (0, 1), "rows"),
        "e": Sharding("grid_shard", (0, 1), "rows", 2),
    }
    with pytest.raises(ValueError, match="two modules"):
        Plan.from_torchrec(SimpleNamespace(plan={"one": one, "two": one}), 2)
    with pytest.raises(ValueError, match=r"table 'a'.*grid_shard.*sharding_spec"):
        Plan.from_torchrec(of_torchrec(a=("grid_shard", [0])), 2)
    with pytest.raises(ValueError, match=r"table 'a'.*table_height_wise"):
        Plan.from_torchrec(of_torchrec(a=("table_height_wise", [0])), 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ('{"world_size": 0, "tables": {}}', "world_size=0"),
        ('{"world_size": 1, "tables": []}', "is no plan"),
        ('{"world_size": 2, "tables": {"t": {"sharding_type": "row_wise"}}}', "table 't'.*sharding_type, ranks"),
        ('{"world_size": 2, "tables": {"t": {"sharding_type": "rowwise", "ranks": [0]}}}', "table 't'.*'rowwise'"),
        ('{"world_size": 2, "tables": {"t": {"sharding_type": "table_wise", "ranks": [0, 1]}}}', "one rank"),
        ('{"world_size": 2, "tables": {"t": {"sharding_type": "row_wise", "ranks": [1, 1]}}}', "distinct"),
        ('{"world_size": 2, "tables": {"t": {"sharding_type": "data_parallel", "ranks": [1]}}}', "on all 2 ranks"),
        (
            '{"world_size": 2, "tables": {"t": {"sharding_type": "row_wise", "ranks": [0, 1], "column_ranges": 2}}}',
            "column_ranges=2: it is of grid_shard",
        ),
        ('{"world_size": 1, "tables": {"t": "row_wise"}}', "table 't': 'row_wise': a sharding is a table of"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
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
def test_tables_that_cannot_be_sharded_so_are_refused(fields: dict[str, Any], sharding: Sharding, said: str) -> None:
    config = tierstore.TableConfig(**({"name": "t", "num_embeddings": 9, "embedding_dim": 8} | fields))
    with pytest.raises(ValueError, match=said):
        local_config(config, sharding, 0)
