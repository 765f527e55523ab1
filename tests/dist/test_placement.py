"""Plans of the planner over real ranks: what it counts is what they do."""

import contextlib
import io
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.dist.placement.support import costs_of, table
from tests.dist.ranks import as_torchrun_starts, run
from tierstore.cli import main
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.placement import RankCosts, demand_of, measure, predict
from tierstore.dist.placement.costs import KINDS
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
    """Rows that each rank looks up in its part in a step, and bytes that it owns."""
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
    """What the command says, as torchrun starts it."""
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
