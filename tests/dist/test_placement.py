"""Plans of the planner over real ranks: what it counts is what they do."""

import contextlib
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.dist.ranks import run
from tests.plan.commands import run as run_command
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.plan import Accesses, TableShape, Workload
from tierstore.plan.placement import RankCosts, measured_demand, predict
from tierstore.plan.placement.costs import ASKER, KINDS, OWNER

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
            rule = tierstore.optim.SGD(lr=0.1)
            store.create_table(
                tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, pooling="sum", optimizer=rule)
            )
        module = ShardedTieredEmbeddingBagCollection(store)
        for step in range(STEPS):
            own = torch.from_numpy(np.concatenate([each[step, dist.get_rank()] for each in ids.values()]))
            lengths = torch.ones(len(own), dtype=torch.int64)
            module(tierstore.KeyedJaggedTensor(list(ids), own, lengths=lengths)).values().sum().backward()
        loads = store.balance()
        return [each.lookups / STEPS for each in loads], [each.num_rows for each in loads]


def test_a_plan_foretells_what_each_rank_looks_up(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(2, SHARDINGS).save(path)
    ((measured, _), _) = run(served, 2, tmp_path, path)
    tables = tuple(TableShape(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in SHARDINGS)
    workload = Workload(name="w", tables=tables, batch_samples=2 * SAMPLES, optimizer="sgd")
    steps = [[ids[step].ravel() | (index << 40) for index, ids in enumerate(_ids().values())] for step in range(STEPS)]
    keys = np.concatenate([np.concatenate(step) for step in steps])
    accesses = Accesses(keys, np.arange(STEPS + 1) * (len(keys) // STEPS), tuple(SHARDINGS))
    nothing = {kind: dict.fromkeys((*ASKER, *OWNER), 0.0) for kind in KINDS}
    costs = RankCosts(
        world_size=2, local_world_size=2, cores=2, optimizer="sgd", seconds=nothing, errors=dict.fromkeys(KINDS, 0.0)
    )
    found = predict(workload, Plan(2, SHARDINGS), measured_demand(workload, accesses, 2), costs)
    # Ranges of row-wise tables are halves; their shares are counted by 64ths.
    assert found.served == pytest.approx(measured, rel=0.02)


def measured_by_command(path: Path, port: int) -> str:
    """What the command says, started as torchrun does."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = f"{port}"
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert run_command("measure-ranks", "--json", path, "--seconds", 0.1, "--optimizer", "sgd") == 0
    return told.getvalue()


def test_costs_are_measured_and_a_plan_is_made_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    costs, workload, plan = (tmp_path / name for name in ("ranks.json", "work.toml", "plan.json"))
    first, other = run(measured_by_command, 2, tmp_path, costs, port)
    assert other == ""
    assert all(name in first for name in (*ASKER, *OWNER, *KINDS))
    found = RankCosts.load(costs)
    assert (found.world_size, found.local_world_size, found.optimizer) == (2, 2, "sgd")
    assert all(found.seconds[kind]["groups"] > 1e-5 for kind in KINDS), "a step takes messages"
    assert all(found.errors[kind] < 1 for kind in KINDS)
    assert max(found.reduce_us, found.reduce_busy_us) > 0, "so do gradients"
    tables = "".join(
        f'[[table]]\nname = "{name}"\nnum_embeddings = {ROWS}\nembedding_dim = {DIM}\n' for name in SHARDINGS
    )
    workload.write_text(f'[workload]\noptimizer = "sgd"\nbatch_samples = {2 * SAMPLES}\n{tables}')
    assert run_command("place", workload, plan, "--costs", costs, "--room", "20KiB", "--force") == 0
    told = capsys.readouterr().out
    assert "work over 2 ranks: a step of its tables takes" in told
    saved = Plan.load(plan)
    assert set(saved.tables) == set(SHARDINGS)
    assert all(name in told for name in SHARDINGS)
    (measured, rows), _ = run(served, 2, tmp_path, plan)
    assert sum(measured) > 0
    assert max(rows) <= len(SHARDINGS) * ROWS
    before = plan.read_text()
    with pytest.raises(FileExistsError):
        run_command("place", workload, plan, "--costs", costs)
    assert plan.read_text() == before
    with pytest.raises(ValueError, match="more than 2 ranks have room for"):
        run_command("place", workload, plan, "--costs", costs, "--room", "1KiB", "--force")
    assert json.loads(before) == json.loads(plan.read_text())


def test_ranks_are_needed_to_measure_them() -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2 -m tierstore plan measure-ranks"):
        run_command("measure-ranks")
