"""A training run and what it must leave behind: a model of each table in plain numpy, copied at each commit."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tierstore
from tierstore import optim
from tierstore.errors import PartlyTrainedError

__all__ = ["DDR", "Snapshot", "Trained", "Workload", "configs", "copied", "differences", "first_tables"]

DDR = "476KiB"
SLACK = 1.05  # so that most transactions clean
"""Holds a fifth of the rows: the others are written back while training."""
Floats = NDArray[np.float32]


def configs() -> list[tierstore.TableConfig]:
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
    extra: dict[str, Any]  # no two have the same
    tensors: dict[str, torch.Tensor]
    tables: dict[str, Trained]
    version: int | None = None  # its number; None until the commit returned
    kept: "tuple[Snapshot, ...]" = ()  # versions that can be opened when this one is the last, itself the last of them


def first_tables(directory: Path) -> dict[str, Trained]:
    tables = {}
    with tierstore.open(directory, ddr="4MiB", threads=1) as store:
        for config in configs():
            rows = store.create_table(config).read(torch.arange(config.num_embeddings)).numpy()
            tables[config.name] = Trained(rows.copy(), np.zeros_like(rows))
    return tables


def copied(tables: dict[str, Trained]) -> dict[str, Trained]:
    return {name: table.copy() for name, table in tables.items()}


@dataclass
class Workload:
    """Changes a store and the model alike.

    Args:
        tables: the model, as the store's version has it; it is changed.
        mark: told of each promise: ("begun" or "returned", a snapshot), ("table", its name).
        keep: versions to keep.
    """

    tables: dict[str, Trained]
    generator: np.random.Generator
    mark: Callable[[str, Any], None] = lambda label, value: None
    keep: int = 1
    steps: int = 0
    serial: int = 0
    store: Any = field(default=None)
    last: Snapshot | None = None  # the last commit that returned
    unfinished: tuple[str, Trained] | None = None  # the table that a call is changing, and what it is to be afterwards
    _pending: tuple[Snapshot, Any] | None = None

    def open(self, directory: Path, **settings: Any) -> "Workload":
        own = {"ddr": DDR, "threads": 1, "keep": self.keep, "slack": SLACK}
        self.store = tierstore.open(directory, **(own | settings))
        for config in configs():
            self.store.create_table(config)
            self.mark("table", config.name)
        return self

    def train(self, steps: int = 1, batch: int = 150) -> None:
        """So many steps; each changes rows of both tables, first in the store, then in the model."""
        for _ in range(steps):
            ids = self.generator.random(batch) ** 2 * len(self.tables["trained"].weights)
            self.train_rows(ids.astype(np.int64))
            self._write_rows(batch // 3)
            self.steps += 1

    def train_rows(self, ids: NDArray[np.int64]) -> None:
        after = self.tables["trained"].copy()
        gradients = self.generator.integers(-3, 4, (len(ids), after.weights.shape[1])).astype(np.float32)
        after.step(ids, gradients)
        self.unfinished = "trained", after
        bag = tierstore.TieredEmbeddingBag(self.store["trained"], mode="sum")
        out = bag(torch.from_numpy(ids), torch.arange(len(ids)))
        (out * torch.from_numpy(gradients)).sum().backward()
        self._finish()

    def _write_rows(self, count: int) -> None:
        after = self.tables["written"].copy()
        ids = self.generator.choice(len(after.weights) // 2, count, replace=False)
        after.weights[ids] = self.generator.random((count, after.weights.shape[1]), np.float32)
        self.unfinished = "written", after
        self.store["written"].write(torch.from_numpy(ids), torch.from_numpy(after.weights[ids]))
        self._finish()

    def _finish(self) -> None:
        assert self.unfinished is not None
        name, after = self.unfinished
        self.tables[name], self.unfinished = after, None

    def take_up(self) -> None:
        name, after = self.unfinished or ("trained", self.tables["trained"])
        before = self.tables[name]
        rows = self.store[name].read(torch.arange(len(before.weights))).numpy()
        done = (rows == after.weights).all(1)
        assert (done | (rows == before.weights).all(1)).all()
        before.weights[done], before.sums[done] = after.weights[done], after.sums[done]
        self.unfinished = None

    def snapshot(self) -> Snapshot:
        self.serial += 1
        extra = {"step": self.steps, "serial": self.serial}
        return Snapshot(extra, {"dense": torch.arange(3) * self.steps}, copied(self.tables))

    def begin(self) -> tuple[Snapshot, Any]:
        begun, self._pending = self.snapshot(), None
        self.mark("begun", begun)
        return begun, self.store.commit_async(extra=begun.extra, tensors=begun.tensors)

    def end(self, begun: Snapshot, future: Any) -> Snapshot:
        number = future.result()
        before = self.last.kept if self.last is not None else ()
        assert not before or number > (before[-1].version or 0)
        begun.version, begun.kept = number, (*before, begun)[-self.keep :]
        self.last = begun
        self.mark("returned", begun)
        return begun

    def commit(self) -> Snapshot:
        return self.end(*self.begin())

    def commit_beside(self, steps: int) -> Snapshot:
        self._pending = begun, future = self.begin()
        self.train(steps)
        self._pending = None
        return self.end(begun, future)

    def settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self.end(*pending)

    def rollback(self, to: Snapshot) -> None:
        assert self.last is not None
        kept = tuple(old for old in self.last.kept if (old.version or 0) <= (to.version or 0))
        shown = replace(to, kept=kept)
        self.mark("begun", shown)
        assert to.version is not None
        self.store.rollback(to.version)
        self.mark("returned", shown)
        self.show(shown)

    def go_back(self, to: Snapshot) -> None:
        """After PartlyTrainedError: nothing goes on until the store is back at its last version, which is whole.

        Then the steps since are done again, and the one that failed.
        """
        goal = self.steps + 1
        for forbidden in (self.store.commit, lambda: self.train_rows(np.zeros(1, np.int64))):
            with pytest.raises(PartlyTrainedError, match=rf"rollback\({to.version}\)"):
                forbidden()
        self.rollback(to)
        assert differences(self.store, to) == []
        self.train(goal - self.steps)

    def show(self, shown: Snapshot) -> None:
        self.last, self.tables, self.steps = shown, copied(shown.tables), shown.extra.get("step", 0)
        self.unfinished = None

    def close(self) -> None:
        self.store.close()


def differences(store: Any, kept: Snapshot) -> list[str]:
    found = []
    if store.extra != kept.extra or kept.version not in (None, store.version):
        found.append(f"version {store.version} {store.extra} instead of {kept.version} {kept.extra}")
    dense = store.tensors()
    if dense.keys() != kept.tensors.keys() or not all(torch.equal(dense[name], kept.tensors[name]) for name in dense):
        found.append(f"tensors {dense} instead of {kept.tensors}")
    for name in store.tables:
        model = kept.tables[name]
        rows = store[name].read(torch.arange(len(model.weights))).numpy()
        wrong = np.flatnonzero((rows != model.weights).any(1))
        if len(wrong):
            found.append(f"{len(wrong)} rows of table {name!r} differ, the first is {wrong[0]}")
    return found
