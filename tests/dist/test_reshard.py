"""Another number of ranks: tables, optimizer state and training go on as they were, whenever it is cut short."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.cli import entry as cli
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.dist.parts import open_parts
from tierstore.dist.reshard import resized
from tierstore.exchange.rows import read_rows

from .ranks import run

ROWS, DIM = 301, 12
TABLES: dict[str, tuple[str, optim.Optimizer]] = {
    "a": ("row_wise", optim.Adam(lr=0.1)),
    "b": ("table_wise", optim.RowWiseAdagrad(lr=0.1)),
    "c": ("column_wise", optim.RowWiseAdagrad(lr=0.1)),
    "d": ("column_wise", optim.Adam(lr=0.1)),
    "e": ("data_parallel", optim.Adagrad(lr=0.1)),
}
Whole = dict[str, tuple[Any, Any, Any]]


def opened(folder: Path) -> Any:
    store = open_sharded(folder, ddr="1MiB", threads=1)
    for name, (kind, rule) in TABLES.items():
        config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule)
        if name not in store.tables:
            store.create_table(config, sharding_type=kind)  # type: ignore[arg-type]
    return store


def train(folder: Path, steps: int) -> tuple[list[Tensor], dict[str, Any]]:
    """(results, ``extra`` at first)."""
    with opened(folder) as store:
        module, results, extra = ShardedTieredEmbeddingBagCollection(store), [], store.extra
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)  # the same on all ranks: their number changes no mean
            ids = torch.randint(0, ROWS, (5 * 20,), generator=generator)
            out = module(tierstore.KeyedJaggedTensor(list(TABLES), ids, lengths=torch.ones(100, dtype=torch.int64)))
            out.values().square().sum().backward()
            results.append(out.values().detach())
        store.commit(extra={"rank": store.ranks.rank}, tensors={"w": torch.ones(3)})
        return results, extra


def whole(folder: Path) -> Whole:
    """Bits of each table and its optimizer's state, and its counter."""
    with tierstore.open(folder, mode="r") as store:
        rows = {name: read_rows(table, 0, ROWS) for name, table in store.tables.items()}
        return {name: (each.weights.tobytes(), each.state.tobytes(), store[name].state) for name, each in rows.items()}


def test_commands_shard_and_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, plain, other, plan = (tmp_path / name for name in ("store", "plain", "other", "plan.json"))
    run(train, 2, tmp_path, folder, 3)
    grid, joined = tmp_path / "grid", tmp_path / "joined"
    before = whole(folder)
    assert cli.main(["reshard", str(folder), str(plain), "--plain"]) == 0
    assert "not sharded" in capsys.readouterr().out
    with tierstore.open(plain, mode="r") as store:
        assert store.extra == {"rank": 0}
    assert whole(plain) == before
    Plan(3, {"a": Sharding("table_wise", (2,))}).save(plan)
    assert cli.main(["reshard", str(plain), str(other), "--ranks", "3", "--plan", str(plan)]) == 0
    assert whole(other) == before
    with open_parts(other) as parts:
        assert parts.shardings["a"] == Sharding("table_wise", (2,))
        assert parts.shardings["b"] == Sharding("row_wise", (0, 1, 2))  # of no plan
    places = Sharding("grid_shard", (0, 3, 2, 1), "rows", 2)
    Plan(4, dict.fromkeys("abc", places)).save(plan)
    for source, target, words in ((other, grid, ["--ranks", "4", "--plan", str(plan)]), (grid, joined, ["--plain"])):
        assert cli.main(["reshard", str(source), str(target), *words]) == 0
        assert whole(target) == before
    with open_parts(grid) as parts:
        assert parts.shardings["a"] == places
        assert resized(parts, 2, {}).tables["a"] == places._replace(ranks=(0, 1))
        assert resized(parts, 3, {}).tables["a"] == Sharding("row_wise", (0, 1, 2))
    assert cli.main(["reshard", str(plain), str(other), "--ranks", "3"]) == 1
    assert "is not empty" in capsys.readouterr().err
    for command in ("inspect", "verify"):
        assert cli.main([command, str(other)]) == 0
        told = capsys.readouterr().out
        assert all(f"{rank}-of-3" in told for rank in range(3))
    assert cli.main(["compact", str(other), str(tmp_path / "compact")]) == 1
    assert f"tierstore reshard {other} NEW_DIR --plain" in capsys.readouterr().err


@pytest.mark.parametrize("target", [["--plain"], ["--ranks", "2"]])
def test_quantized_rows_are_refused_at_once(
    target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tierstore.open(tmp_path / "exact", ddr="1MiB") as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=ROWS, embedding_dim=8))
        store["a"].write(torch.arange(10), torch.ones(10, 8))
        store.commit()
    tierstore.quantize(tmp_path / "exact", tmp_path / "small", dtype="int8")
    assert cli.main(["reshard", str(tmp_path / "small"), str(tmp_path / "new"), *target]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in ("table 'a'", "int8 rows", "tierstore backup"))
    assert not (tmp_path / "new").exists()
