"""A training run and what it must leave behind: a model of each table in plain numpy, copied at each commit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore import optim

__all__ = ["DDR", "Snapshot", "Trained", "Workload", "configs", "copied", "differences", "first_tables"]

DDR = "420KiB"
"""Holds a fifth of the rows: the others are written back while training."""
Floats = NDArray[np.float32]


def configs() -> list[tierstore.TableConfig]:
    """Two tables of different layouts: one is trained, of the other single rows are overwritten."""
    return [
        tierstore.TableConfig(
            name="trained",
            num_embeddings=700,
            embedding_dim=16,
            init=tierstore.init.Uniform(-1, 1, seed=3),
            optimizer=optim.Adagrad(lr=0.5),
        ),
        tierstore.TableConfig(
            name="written", num_embeddings=400, embedding_dim=60, init=tierstore.init.Uniform(-1, 1, seed=4)
        ),
    ]


@dataclass
class Trained:
    """A table in memory: float32 [rows, dim], with Adagrad's sums. Gradients are small integers, so sums are exact."""

    weights: Floats
    sums: Floats

    def step(self, ids: NDArray[np.int64], gradients: Floats) -> None:
        """Adagrad with lr=0.5, column by column, on the merged gradient of each id."""
        rows = np.unique(ids)
        merged = np.zeros_like(self.weights)
        np.add.at(merged, ids, gradients)
        gradient = merged[rows]
        self.sums[rows] += gradient * gradient
        root = np.sqrt(self.sums[rows]) + np.float32(1e-10)
        self.weights[rows] -= np.float32(0.5) * gradient / root

    def copy(self) -> "Trained":
        return Trained(self.weights.copy(), self.sums.copy())


@dataclass
class Snapshot:
    """What one version shows.

    Attributes:
        version: its number.
        tables: by name; tables that are not in it show their first values.
    """

    version: int
    extra: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    tables: dict[str, Trained]


def first_tables(directory: Path) -> dict[str, Trained]:
    """The tables before anything was written, each read once from a store of its own."""
    tables = {}
    with tierstore.open(directory, ddr="4MiB", threads=1) as store:
        for config in configs():
            rows = store.create_table(config).read(torch.arange(config.num_embeddings)).numpy()
            tables[config.name] = Trained(rows.copy(), np.zeros_like(rows))
    return tables


def copied(tables: dict[str, Trained]) -> dict[str, Trained]:
    """A copy that later steps do not change."""
    return {name: table.copy() for name, table in tables.items()}


@dataclass
class Workload:
    """Changes a store and the model alike.

    Args:
        tables: the model, as the store's version has it; it is changed.
        mark: told of each promise: ("begun" or "returned", a snapshot), ("table", its name).

    Attributes:
        last: the last commit that returned.
    """

    tables: dict[str, Trained]
    generator: np.random.Generator
    mark: Callable[[str, Any], None] = lambda label, value: None
    last_version: int = 0
    steps: int = 0
    store: Any = field(default=None)
    last: Any = field(default=None)

    def open(self, directory: Path, **settings: Any) -> "Workload":
        """Open the store and create the tables that it lacks."""
        self.store = tierstore.open(directory, **{"mode": "w", "ddr": DDR, "threads": 1, **settings})
        for config in configs():
            self.store.create_table(config)
            self.mark("table", config.name)
        return self

    def train(self, steps: int = 1, batch: int = 150) -> None:
        """So many steps; each changes rows of both tables, first in the store, then in the model."""
        for _ in range(steps):
            ids = self.generator.random(batch) ** 2 * len(self.tables["trained"].weights)
            self.train_rows(ids.astype(np.int64))
            self._write_once(self.store["written"], batch // 3)
            self.steps += 1

    def train_rows(self, ids: NDArray[np.int64]) -> None:
        """One optimizer step on these rows; each position of ``ids`` has its gradient."""
        model = self.tables["trained"]
        gradients = self.generator.integers(-3, 4, (len(ids), model.weights.shape[1])).astype(np.float32)
        bag = tierstore.TieredEmbeddingBag(self.store["trained"], mode="sum")
        out = bag(torch.from_numpy(ids), torch.arange(len(ids)))
        (out * torch.from_numpy(gradients)).sum().backward()
        model.step(ids, gradients)

    def _write_once(self, table: Any, count: int) -> None:
        model = self.tables["written"]
        ids = self.generator.choice(len(model.weights) // 2, count, replace=False)
        rows = self.generator.random((count, model.weights.shape[1]), np.float32)
        table.write(torch.from_numpy(ids), torch.from_numpy(rows))
        model.weights[ids] = rows

    def snapshot(self) -> Snapshot:
        """What a commit now must keep."""
        tensors = {"dense": torch.arange(3) * self.steps}
        return Snapshot(self.last_version + 1, {"step": self.steps}, tensors, copied(self.tables))

    def commit(self) -> Snapshot:
        """Commit, telling when it began and when it returned."""
        kept = self.snapshot()
        self.mark("begun", kept)
        number = self.store.commit(extra=kept.extra, tensors=kept.tensors)
        assert number == kept.version
        self.last_version, self.last = number, kept
        self.mark("returned", kept)
        return kept

    def commit_beside(self, steps: int) -> Snapshot:
        """Commit in the background, training so many steps meanwhile."""
        kept = self.snapshot()
        self.mark("begun", kept)
        future = self.store.commit_async(extra=kept.extra, tensors=kept.tensors)
        future.add_done_callback(lambda done: done.exception() is None and self.mark("returned", kept))
        self.last_version = kept.version
        self.train(steps)
        assert future.result() == kept.version
        return kept

    def rollback(self, to: Snapshot) -> None:
        """Go back to a version that is kept."""
        self.mark("begun", to)
        self.store.rollback(to.version)
        self.tables = copied(to.tables)
        self.steps = to.extra["step"]
        self.mark("returned", to)

    def close(self) -> None:
        self.store.close()


def differences(store: Any, kept: Snapshot, tables: dict[str, Trained]) -> list[str]:
    """What an open store shows otherwise than this version; ``tables`` are those that it must have."""
    found = []
    if (store.version, store.extra) != (kept.version, kept.extra):
        found.append(f"version {store.version} {store.extra} instead of {kept.version} {kept.extra}")
    dense = store.tensors()
    if dense.keys() != kept.tensors.keys() or not all(torch.equal(dense[name], kept.tensors[name]) for name in dense):
        found.append(f"tensors {dense} instead of {kept.tensors}")
    for name in tables:
        model = kept.tables[name]
        rows = store[name].read(torch.arange(len(model.weights))).numpy()
        wrong = np.flatnonzero((rows != model.weights).any(1))
        if len(wrong):
            found.append(f"{len(wrong)} rows of table {name!r} differ, the first is {wrong[0]}")
    return found
