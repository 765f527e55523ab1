"""A training run and what it must leave behind: a model of each table in plain numpy, copied at each commit."""

import copy
from collections.abc import Callable
from concurrent.futures import Future
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
from tierstore.layout import KEY_ROW_BITS

DDR = "476KiB"
"""Holds a fifth of the rows: the others are written back while training."""
SLACK = 1.05  # so that most transactions clean
Floats = NDArray[np.float32]
CONFIGS = [
    tierstore.TableConfig(
        name="trained", num_embeddings=700, embedding_dim=16, init=tierstore.init.Uniform(-1, 1, seed=3),
        optimizer=optim.Adagrad(lr=0.5),
    ),
    tierstore.TableConfig(
        name="written", num_embeddings=400, embedding_dim=60, init=tierstore.init.Uniform(-1, 1, seed=4)
    ),
]  # fmt: skip


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


Tables = dict[str, Trained]


@dataclass
class Snapshot:
    extra: dict[str, Any]  # no two have the same
    tensors: dict[str, torch.Tensor]
    tables: Tables
    version: int | None = None  # its number; None until the commit returned
    kept: "tuple[Snapshot, ...]" = ()  # versions that can be opened when this one is the last, itself the last of them


def first_tables() -> Tables:
    tables = {}
    for index, config in enumerate(CONFIGS):
        count, dim = config.num_embeddings, config.embedding_dim
        rows, keys = np.empty((count, dim), np.float32), np.arange(count) | index << KEY_ROW_BITS
        config.init.fill(keys, np.arange(count, dtype=np.int32), rows, dim, 0)
        tables[config.name] = Trained(rows, np.zeros_like(rows))
    return tables


@dataclass
class Workload:
    """Changes a store and the model, ``tables``, alike; ``mark`` is told of each promise: ("begun" or "returned", a
    snapshot), ("table", its name)."""

    tables: Tables
    generator: np.random.Generator
    mark: Callable[[str, Any], None] = lambda label, value: None
    keep: int = 1
    steps: int = 0
    serial: int = 0
    store: Any = field(default=None)
    last: Snapshot | None = None  # the last commit that returned
    unfinished: tuple[str, Trained] | None = None  # the table that a call is changing, and what it is to be afterwards
    pending: tuple[Snapshot, "Future[int]"] | None = None

    def open(self, directory: Path) -> "Workload":
        self.store = tierstore.open(directory, ddr=DDR, threads=1, keep=self.keep, slack=SLACK)
        for config in CONFIGS:
            self.store.create_table(config)
            self.mark("table", config.name)
        return self

    def train(self, steps: int = 1, batch: int = 150) -> None:
        for _ in range(steps):
            self.train_rows((self.generator.random(batch) ** 2 * len(self.tables["trained"].weights)).astype(np.int64))
            after = copy.deepcopy(self.tables["written"])
            rows = self.generator.choice(len(after.weights) // 2, batch // 3, replace=False)
            after.weights[rows] = self.generator.random((len(rows), after.weights.shape[1]), np.float32)
            self.unfinished = "written", after
            self.store["written"].write(torch.from_numpy(rows), torch.from_numpy(after.weights[rows]))
            self.tables["written"], self.unfinished = after, None
            self.steps += 1

    def train_rows(self, ids: NDArray[np.int64]) -> None:
        after = copy.deepcopy(self.tables["trained"])
        gradients = self.generator.integers(-3, 4, (len(ids), after.weights.shape[1])).astype(np.float32)
        after.step(ids, gradients)
        self.unfinished = "trained", after
        bag = tierstore.TieredEmbeddingBag(self.store["trained"], mode="sum")
        out = bag(torch.from_numpy(ids), torch.arange(len(ids)))
        (out * torch.from_numpy(gradients)).sum().backward()
        self.tables["trained"], self.unfinished = after, None

    def take_up(self) -> None:
        """After a call that failed: each row is as before it or after it."""
        name, after = self.unfinished or ("trained", self.tables["trained"])
        before = self.tables[name]
        rows = self.store[name].read(torch.arange(len(before.weights))).numpy()
        done = (rows == after.weights).all(1)
        assert (done | (rows == before.weights).all(1)).all()
        before.weights[done], before.sums[done] = after.weights[done], after.sums[done]
        self.unfinished = None

    def commit(self, steps: int = 0) -> Snapshot:
        """In the background of so many steps."""
        self.serial += 1
        extra = {"step": self.steps, "serial": self.serial}
        begun = Snapshot(extra, {"dense": torch.arange(3) * self.steps}, copy.deepcopy(self.tables))
        self.pending = None
        self.mark("begun", begun)
        self.pending = begun, self.store.commit_async(extra=begun.extra, tensors=begun.tensors)
        self.train(steps)
        self.settle()
        return begun

    def settle(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            begun, number = pending[0], pending[1].result()
            before = self.last.kept if self.last is not None else ()
            assert not before or number > (before[-1].version or 0)
            begun.version, begun.kept = number, (*before, begun)[-self.keep :]
            self.last = begun
            self.mark("returned", begun)

    def rollback(self, to: Snapshot) -> None:
        kept = tuple(old for old in self.last.kept if (old.version or 0) <= to.version)
        shown = replace(to, kept=kept)
        self.mark("begun", shown)
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
        self.last, self.tables, self.steps = shown, copy.deepcopy(shown.tables), shown.extra.get("step", 0)
        self.unfinished = None


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
