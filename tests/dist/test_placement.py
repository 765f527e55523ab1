"""Sharding plans: every value has its owners, files say what was planned, and real ranks do what plans count."""

import contextlib
import io
import json
import random
import socket
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.dist.placement.support import costs_of, table
from tests.dist.ranks import as_torchrun_starts, run
from tierstore import optim
from tierstore.cli import main
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.owners import local_config
from tierstore.dist.placement import RankCosts, demand_of, measure, predict
from tierstore.dist.placement.costs import KINDS
from tierstore.dist.plan import ShardingType
from tierstore.trace import TableTrace, Trace

ROWS, DIM, SAMPLES, STEPS = 60, 8, 20, 3
SHARDINGS = {
    "by_rows": Sharding("row_wise", (1, 0)),
    "by_rows_pooled": Sharding("row_wise", (0, 1), "pooled"),
    "whole": Sharding("table_wise", (1,)),
    "whole_pooled": Sharding("table_wise", (0,), "pooled"),
    "by_columns": Sharding("column_wise", (0, 1)),
    "copied": Sharding("data_parallel", (0, 1)),
}


def _ids() -> dict[str, Any]:
    """int64 [steps, ranks, samples] of each table, more of its first rows."""
    generator = np.random.default_rng(4)
    return {name: (ROWS * generator.random((STEPS, 2, SAMPLES)) ** 2).astype(np.int64) for name in SHARDINGS}


def served(plan_path: Path) -> tuple[list[float], list[int]]:
    ids = _ids()
    with open_sharded(cold="memory", ddr="16MiB", plan=plan_path) as store:
        for name in SHARDINGS:
            store.create_table(table(name, ROWS, DIM))
        module = ShardedTieredEmbeddingBagCollection(store)
        for step in range(STEPS):
            own = torch.from_numpy(np.concatenate([each[step, dist.get_rank()] for each in ids.values()]))
            lengths = torch.ones(len(own), dtype=torch.int64)
            module(tierstore.KeyedJaggedTensor(list(ids), own, lengths=lengths)).values().sum().backward()
        loads = store.balance()
        return [each.lookups / STEPS for each in loads], [each.num_rows for each in loads]


def test_a_plan_foretells_what_each_rank_looks_up(tmp_path: Path) -> None:
    path, offsets = tmp_path / "plan.json", np.arange(2 * SAMPLES * STEPS + 1)
    Plan(2, SHARDINGS).save(path)
    ((measured, _), _) = run(served, 2, tmp_path, path)
    traced = {name: TableTrace(ids.ravel(), offsets) for name, ids in _ids().items()}
    tables = [table(name, ROWS, DIM) for name in SHARDINGS]
    demand = demand_of(Trace(tables=traced, batch_samples=2 * SAMPLES), tables, 2)
    # Ranges of row-wise tables are halves; their shares are counted by 64ths.
    assert predict(tables, Plan(2, SHARDINGS), demand, costs_of(2)).served == pytest.approx(measured, rel=0.02)


def measured_by_command(path: Path, port: int) -> str:
    as_torchrun_starts(port)
    measure._ROUNDS, measure._STEPS, measure._MOST_IDS = 1, 1, 1000  # type: ignore[misc]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["shard", "measure", "--out", str(path), "--seconds", "0.1", "--optimizer", "sgd"]) == 0
    return said.getvalue()


def test_costs_are_measured_and_a_plan_is_made_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    costs, workload, plan = (tmp_path / name for name in ("ranks.json", "work.toml", "plan.json"))
    first, other = run(measured_by_command, 2, tmp_path, costs, port)
    assert other == ""
    assert all(name in first for name in KINDS)
    found = RankCosts.load(costs)
    assert (found.world_size, found.local_world_size, found.optimizer) == (2, 2, "sgd")
    assert all(sum(vars(getattr(found.seconds, kind)).values()) > 0 for kind in KINDS)
    assert all(getattr(found.errors, kind) < 1 for kind in KINDS)
    assert max(found.reduce_us, found.reduce_busy_us) > 0, "so do gradients"
    tables = "".join(
        f'[[workload.tables]]\nname = "{name}"\nnum_embeddings = {ROWS}\nembedding_dim = {DIM}\n' for name in SHARDINGS
    )
    workload.write_text(f'[workload]\noptimizer = "sgd"\nbatch_samples = {2 * SAMPLES}\n{tables}')
    words = ["shard", "plan", str(workload), str(plan), "--costs", str(costs), "--limit"]
    assert main([*words, "20KiB"]) == 0
    said = capsys.readouterr().out
    assert "over 2 ranks takes" in said
    assert all(name in said for name in SHARDINGS)
    saved = Plan.load(plan)
    assert set(saved.tables) == set(SHARDINGS)
    (measured, rows), _ = run(served, 2, tmp_path, plan)
    assert sum(measured) > 0
    assert max(rows) <= len(SHARDINGS) * ROWS
    assert main([*words, "20KiB"]) == 1, "without --force"
    assert main([*words, "1KiB", "--force"]) == 2
    assert main([*words[:5], str(workload), "--force"]) == 2, "a workload is no costs"
    assert Plan.load(plan) == saved


def drawn_sharding(draw: random.Random, size: int) -> Sharding:
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
