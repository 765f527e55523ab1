"""The stores that are served: Criteo-Kaggle's tables as a training run leaves them, and one table of plain rows."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import tierstore
from tierstore.plan.published import KAGGLE_ROWS
from tierstore.train.build import Run, build_run
from tierstore.train.checkpoint import Position, commit_run
from tierstore.train.config import (
    DataSection,
    EmbeddingSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    StoreSection,
    TrainSection,
)

__all__ = [
    "CANARY",
    "CANARY_ROWS",
    "NUMBERS",
    "ROWS_TABLE",
    "add_canary",
    "kaggle_rows",
    "kaggle_store",
    "numbered_store",
    "ranking_run",
    "rows_store",
    "table_bytes",
    "write_canary",
]

CANARY: Final = "canary"
"""A small table whose every element is the number of the version that wrote it."""
CANARY_ROWS: Final = 256
ROWS_TABLE: Final = "t0"
NUMBERS: Final = 4096
"""Of a numbered table: row i holds i modulo this, in every element."""
_CHUNK: Final = 500_000
_BUILD_DDR: Final = "512MiB"


def kaggle_rows(config: Mapping[str, Any]) -> list[int]:
    """Rows of each table."""
    return [max(3, int(each * config["kaggle_scale"])) for each in KAGGLE_ROWS]


def table_bytes(config: Mapping[str, Any]) -> int:
    """Of all rows, without their optimizer's state."""
    return sum(kaggle_rows(config)) * int(config["dim"]) * 4


def ranking_run(config: Mapping[str, Any], path: Path) -> RunConfig:
    """The published DLRM baseline's model over those tables. Categories are row ids as they are."""
    return RunConfig(
        store=StoreSection(path=str(path)),
        data=DataSection(hashing="mod"),
        embedding=EmbeddingSection(dim=config["dim"], num_embeddings=tuple(kaggle_rows(config))),
        model=ModelSection(bottom_mlp=tuple(config["bottom_mlp"]), top_mlp=tuple(config["top_mlp"])),
        optimizer=OptimizerSection(sparse=config["optimizer"], dense="sgd"),
        train=TrainSection(seed=config["seed"]),
    )


def add_canary(store: tierstore.Store, config: Mapping[str, Any]) -> tierstore.Table:
    """The table, made where it is missing."""
    rule = tierstore.optim.SGD(lr=0.1)
    return store.create_table(
        tierstore.TableConfig(
            name=CANARY, num_embeddings=CANARY_ROWS, embedding_dim=config["dim"], pooling="sum", optimizer=rule
        )
    )


def write_canary(table: tierstore.Table, number: int) -> None:
    table.write(torch.arange(CANARY_ROWS), torch.full((CANARY_ROWS, table.config.embedding_dim), float(number)))


def _fill(table: tierstore.Table, generator: np.random.Generator) -> None:
    rows, dim = table.config.num_embeddings, table.config.embedding_dim
    for first in range(0, rows, _CHUNK):
        ids = torch.arange(first, min(first + _CHUNK, rows))
        values = generator.random((len(ids), dim), np.float32)
        table.write(ids, torch.from_numpy(values).sub_(0.5).mul_(0.1))


def _once(path: Path, made_of: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Build the store unless it was built to the end before, of the same."""
    marker = path.with_name(f"{path.name}.json")
    if marker.exists() and json.loads(marker.read_text()) == made_of:
        return path
    marker.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.with_name(f"{path.name}.hot").unlink(missing_ok=True)
    print(f"building {path}", flush=True)
    build(path)
    marker.write_text(json.dumps(made_of))
    return path


def kaggle_store(folder: Path, config: Mapping[str, Any]) -> Path:
    """A store in which every row was written, committed as by a training run."""
    names = ("kaggle_scale", "dim", "bottom_mlp", "top_mlp", "optimizer", "seed")

    def build(path: Path) -> None:
        with tierstore.open(path, mode="w", ddr=_BUILD_DDR) as store:
            run_config = ranking_run(config, path)
            run: Run = build_run(run_config, store)
            canary = add_canary(store, config)
            generator = np.random.default_rng(config["seed"])
            for name in run_config.data.sparse_columns:
                _fill(store[name], generator)
            write_canary(canary, 1)
            commit_run(run, run_config, Position()).result()

    return _once(folder / "serve_kaggle", {name: config[name] for name in names}, build)


def rows_store(folder: Path, config: Mapping[str, Any]) -> Path:
    """A store of one table without optimizer state, every row written."""
    rows, dim, seed = config["peer_rows"], config["dim"], config["seed"]

    def build(path: Path) -> None:
        with tierstore.open(path, mode="w", ddr=_BUILD_DDR) as store:
            rule = tierstore.optim.SGD(lr=0.1)
            table = store.create_table(
                tierstore.TableConfig(name=ROWS_TABLE, num_embeddings=rows, embedding_dim=dim, optimizer=rule)
            )
            _fill(table, np.random.default_rng(seed))
            store.commit()

    return _once(folder / "serve_rows", {"rows": rows, "dim": dim, "seed": seed}, build)


def numbered_store(folder: Path, config: Mapping[str, Any]) -> Path:
    """A store of one table "item", pooled by sums, every row of which tells its id."""
    rows, dim = config["hostile_rows"], config["dim"]

    def build(path: Path) -> None:
        with tierstore.open(path, mode="w", ddr=_BUILD_DDR) as store:
            rule = tierstore.optim.SGD(lr=0.1)
            table = store.create_table(
                tierstore.TableConfig(
                    name="item", num_embeddings=rows, embedding_dim=dim, pooling="sum", optimizer=rule
                )
            )
            for first in range(0, rows, _CHUNK):
                ids = torch.arange(first, min(first + _CHUNK, rows))
                table.write(ids, (ids % NUMBERS).to(torch.float32)[:, None].expand(-1, dim))
            store.commit()

    return _once(folder / "serve_numbered", {"rows": rows, "dim": dim}, build)
