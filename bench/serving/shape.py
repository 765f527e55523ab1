"""The stores that are served: Criteo-Kaggle's tables as a training run leaves them, and one table of plain rows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import tierstore
from tierstore.plan.workload import load_workload
from tierstore.train.build import build_run
from tierstore.train.checkpoint import Position, commit_run
from tierstore.train.config import load, parse_override

from ..data import ROOT
from ..rowdata import build_once
from ..workload import chunks

CANARY: Final = "canary"
"""A small table whose every element is the number of the version that wrote it."""
CANARY_ROWS: Final = 256
ROWS_TABLE: Final = "t0"

Config = Mapping[str, Any]


def kaggle_rows(config: Config) -> list[int]:
    """Rows of each table."""
    return [max(3, int(each.num_embeddings * config["kaggle_scale"])) for each in load_workload("criteo-kaggle").tables]


def _add_table(store: tierstore.Store, name: str, rows: int, dim: int) -> tierstore.Table:
    shape: Any = {"num_embeddings": rows, "embedding_dim": dim, "pooling": "sum"}
    return store.create_table(tierstore.TableConfig(name=name, optimizer=tierstore.optim.SGD(lr=0.1), **shape))


def write_canary(table: tierstore.Table, number: int) -> None:
    table.write(torch.arange(CANARY_ROWS), torch.full((CANARY_ROWS, table.config.embedding_dim), float(number)))


def _fill(table: tierstore.Table, generator: np.random.Generator) -> None:
    for ids in chunks(table):
        values = generator.random((len(ids), table.config.embedding_dim), np.float32)
        table.write(ids, torch.from_numpy(values).sub_(0.5).mul_(0.1))


def fill_tables(store: tierstore.Store, tables: Mapping[str, int], dim: int, generator: np.random.Generator) -> None:
    """Add tables of so many rows, by name, every row written, and commit."""
    for name, rows in tables.items():
        _fill(_add_table(store, name, rows, dim), generator)
    store.commit()


def built(path: Path, made_of: Config, fill: Callable[[tierstore.Store, np.random.Generator], object]) -> Path:
    """A store, every row written, unless it was built before."""

    def build(path: Path) -> None:
        path.with_name(f"{path.name}.hot").unlink(missing_ok=True)
        with tierstore.open(path, mode="w", ddr="512MiB") as store:
            fill(store, np.random.default_rng(made_of["seed"]))

    return build_once(path, made_of, build)


def kaggle_store(folder: Path, config: Config) -> Path:
    """The published DLRM baseline's model over Kaggle's tables, committed as by a training run."""
    path, names = folder / "serve_kaggle", ("kaggle_scale", "dim", "bottom_mlp", "top_mlp", "seed")
    settings = {
        "store.path": f'"{path}"', "data.hashing": '"mod"', "embedding.dim": config["dim"],
        "embedding.num_embeddings": kaggle_rows(config), "model.bottom_mlp": config["bottom_mlp"],
        "model.top_mlp": config["top_mlp"], "optimizer.sparse": '"rowwise_adagrad"', "optimizer.dense": '"sgd"',
        "train.seed": config["seed"],
    }  # fmt: skip

    def build(store: tierstore.Store, generator: np.random.Generator) -> None:
        overrides = [parse_override(f"{name}={value}") for name, value in settings.items()]
        run_config = load(ROOT / "examples" / "criteo.toml", overrides)
        run = build_run(run_config, store)
        for name in run_config.data.sparse_columns:
            _fill(store[name], generator)
        write_canary(_add_table(store, CANARY, CANARY_ROWS, config["dim"]), 1)
        commit_run(run, Position()).result()

    return built(path, {name: config[name] for name in names}, build)


def rows_store(folder: Path, config: Config) -> Path:
    """A store of one table without optimizer state."""
    made_of = {"rows": config["peer_rows"], "dim": config["dim"], "seed": config["seed"]}

    def build(store: tierstore.Store, generator: np.random.Generator) -> None:
        fill_tables(store, {ROWS_TABLE: made_of["rows"]}, made_of["dim"], generator)

    return built(folder / "serve_rows", made_of, build)
