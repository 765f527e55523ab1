"""The whole store against arrays: any order of writes, reads, training steps, commits, changes of tables, reopenings
and rollbacks, with rows in memory, on SSD or in device memory, and a reader that follows.

The model shares nothing with the store but the initializer, which ``test_init`` checks on its own.
"""

import copy
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tierstore
from tierstore import optim
from tierstore.errors import TableError
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import KEY_ROW_BITS

ROWS, LR, KEEP, DDR = 300, 0.5, 3, "560KiB"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RULES = [optim.SGD(lr=LR), optim.Adagrad(lr=LR), optim.RowWiseAdagrad(lr=LR)]
INIT = tierstore.init.Uniform(-1, 1, seed=9)
ids = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=150)
rules = st.sampled_from(RULES)
hbms = st.sampled_from(["0", "0", "64KiB", "96KiB"])


class Model:
    """One table, in arrays. ``born`` is the place that it was created in, by which its first values go."""

    def __init__(self, born: int, config: tierstore.TableConfig) -> None:
        self.born, self.config = born, config
        self.weights = self.first_values()
        self.written: set[int] = set()
        self.restart()

    def first_values(self) -> torch.Tensor:
        count, dim = self.config.num_embeddings, self.config.embedding_dim
        out = np.zeros((count, dim), np.float32)
        INIT.fill(np.arange(count) | (self.born << KEY_ROW_BITS), np.arange(count, dtype=np.int32), out, dim, 0)
        return torch.from_numpy(out).to(DTYPES[self.config.dtype])

    def restart(self) -> None:
        width = self.config.optimizer.state_dim(self.config.embedding_dim)
        self.state = np.zeros((self.config.num_embeddings, width), np.float32)

    def change(self, config: tierstore.TableConfig) -> None:
        weights, state = self.weights, self.state
        self.config = config
        self.weights = self.first_values()
        self.weights[: len(weights)] = weights
        self.restart()
        self.state[: len(state)] = state

    def write(self, rows: list[int], values: torch.Tensor) -> None:
        for row, value in zip(rows, values, strict=True):
            self.weights[row] = value
        self.written |= set(rows)

    def train(self, ids: list[int]) -> None:
        rows, counts = np.unique(ids, return_counts=True)
        gradient = np.repeat(counts.astype(np.float32)[:, None], self.config.embedding_dim, axis=1)
        rate, rule, step = np.float32(LR), self.config.optimizer, np.float32(LR) * gradient
        if isinstance(rule, optim.RowWiseAdagrad):  # so is Adagrad
            self.state[rows] += gradient[:, : self.state.shape[1]] ** 2
            root = np.sqrt(self.state[rows]) + np.float32(rule.eps)
            step = rate * gradient / root if type(rule) is optim.Adagrad else rate / root * gradient
        self.weights[rows] = (self.weights[rows].float() - torch.from_numpy(step)).to(self.weights.dtype)
        self.written |= set(rows.tolist())

    def shown(self, then: "Model | None") -> "Model":
        """This table as a version has its rows; first values if that has none."""
        made = Model(self.born, self.config)
        if then is not None:
            count = len(then.weights)
            made.weights[:count], made.state[:count], made.written = then.weights, then.state, set(then.written)
        return made

    def check(self, table: tierstore.Table) -> None:
        every = torch.arange(len(self.weights))
        assert table.config == self.config
        assert torch.equal(table.read(every), self.weights)
        assert np.array_equal(table.read_state(every).numpy(), self.state)
        assert {int(row) for part in table.written() for row in part} == self.written


class StoreMachine(RuleBasedStateMachine):
    """``live`` is what reads must show, by name; ``saved`` what each kept version has, by its number and by birth."""

    @initialize(
        kind=st.sampled_from(["disk", "disk", "memory"]), policy=st.sampled_from(["lru", "lfu", "tinylfu"]),
        threads=st.integers(1, 3), hbm=hbms,
    )  # fmt: skip
    def begin(self, kind: str, policy: str, threads: int, hbm: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.on_disk = kind == "disk"
        self.settings: dict[str, Any] = {"policy": policy, "threads": threads, "ddr": DDR, "keep": KEEP, "hbm": hbm}
        self.where: dict[str, Any] = {"directory": self.folder / "store"} if self.on_disk else {"cold": "memory"}
        self.live: dict[str, Model] = {}
        self.saved: dict[int, dict[int, Model]] = {0: {}}
        self.saved_extra: dict[int, dict[str, int]] = {0: {}}
        self.last_version = self.count = 0
        self.pending: Future[int] | None = None
        self.followed: dict[str, Model] = {}
        self.open()
        self.follower = tierstore.open(**self.where, mode="r", ddr=DDR) if self.on_disk else None

    def open(self) -> None:
        self.store = tierstore.open(**self.where, **self.settings)

    def new_name(self) -> str:
        self.count += 1
        return f"table {self.count}"

    def drawn(self, data: st.DataObject) -> tuple[str, Model]:
        name = data.draw(st.sampled_from(sorted(self.live)))
        return name, self.live[name]

    @precondition(lambda self: len(self.live) < 3)
    @rule(dtype=st.sampled_from(sorted(DTYPES)), dim=st.integers(1, 9), optimizer=rules)
    def create(self, dtype: Any, dim: int, optimizer: optim.Optimizer) -> None:
        config = tierstore.TableConfig(
            name=self.new_name(), num_embeddings=ROWS, embedding_dim=dim, dtype=dtype, init=INIT, optimizer=optimizer
        )
        self.live[config.name] = Model(self.store.create_table(config).index, config)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def write(self, data: st.DataObject, rows: list[int]) -> None:
        name, model = self.drawn(data)
        values = torch.randn(len(rows), model.config.embedding_dim).to(model.weights.dtype)
        self.store[name].write(torch.tensor(rows), values)
        model.write(rows, values)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def read(self, data: st.DataObject, rows: list[int]) -> None:
        name, model = self.drawn(data)
        assert torch.equal(self.store[name].read(torch.tensor(rows)), model.weights[rows])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def train(self, data: st.DataObject, rows: list[int]) -> None:
        name, model = self.drawn(data)
        out = tierstore.TieredEmbeddingBag(self.store[name], mode="sum")(torch.tensor([rows]))
        total = np.zeros(model.config.embedding_dim, np.float32)
        for value in model.weights[rows]:
            total += value.float().numpy()
        assert np.array_equal(out[0].detach().numpy(), total)
        out.sum().backward()
        model.train(rows)

    @rule(extra=st.integers(0, 1000), wait=st.booleans())
    def commit(self, extra: int = 0, wait: bool = True) -> None:
        """In the background, if it is not waited for: what follows belongs to the next version."""
        self.settle()
        if wait:
            assert self.store.commit(extra={"number": extra}) == self.last_version + 1
        else:
            self.pending = self.store.commit_async(extra={"number": extra})
        self.save({"number": extra}, [*self.saved][1 - KEEP :])

    def save(self, extra: dict[str, int], kept: Iterable[int]) -> None:
        self.last_version += 1
        self.saved = {version: self.saved[version] for version in kept if version} | {
            self.last_version: {each.born: copy.deepcopy(each) for each in self.live.values()}
        }
        self.saved_extra[self.last_version] = extra

    def settle(self) -> None:
        if self.pending is not None:
            assert self.pending.result() == self.last_version
            self.pending = None

    @property
    def version(self) -> int:
        return max(self.saved)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 100), optimizer=rules)
    def change(self, data: st.DataObject, more: int, optimizer: optim.Optimizer) -> None:
        name, model = self.drawn(data)
        self.settle()
        if self.store.changed_tables:
            with pytest.raises(TableError, match="changed since the last commit"):
                self.store.drop_table(name)
            self.commit()
        what = data.draw(st.sampled_from(["name", "num_embeddings", "optimizer", "drop"]))
        if what == "optimizer" and type(optimizer) is not type(model.config.optimizer):
            with pytest.raises(TableError, match="tierstore import --optimizer"):
                self.store.change_table(name, optimizer=optimizer)
            return
        del self.live[name]
        if what == "drop":
            self.store.drop_table(name)
            return
        asked = {"name": self.new_name(), "num_embeddings": len(model.weights) + more, "optimizer": optimizer}[what]
        model.change(self.store.change_table(name, **{what: asked}).config)
        self.live[model.config.name] = model

    @precondition(lambda self: self.on_disk)
    @rule(policy=st.sampled_from(["lru", "tinylfu"]), ddr=st.sampled_from([DDR, "4MiB"]), hbm=hbms)
    def reopen(self, policy: str, ddr: str, hbm: str) -> None:
        self.store.close()
        self.settings |= {"policy": policy, "ddr": ddr, "hbm": hbm}
        self.open()
        self.show_version()

    @precondition(lambda self: self.version)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.saved.keys() - {0})))
        self.store.rollback(version)
        self.saved = {kept: tables for kept, tables in self.saved.items() if kept <= version}
        self.show_version()

    def show(self, version: int) -> dict[str, Model]:
        return {name: model.shown(self.saved[version].get(model.born)) for name, model in self.live.items()}

    def show_version(self) -> None:
        self.pending = None
        self.live = self.show(self.version)
        assert (self.store.version, self.store.extra) == (self.version, self.saved_extra[self.version])
        assert self.store.versions == tuple(sorted(self.saved.keys() - {0}))

    @precondition(lambda self: self.version and self.on_disk)
    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        self.settle()
        version = data.draw(st.sampled_from(sorted(self.saved.keys() - {0})))
        with tierstore.open(self.folder / "store", mode="r", version=version, ddr=DDR) as store:
            assert (store.version, store.extra) == (version, self.saved_extra[version])
            for name, model in self.show(version).items():
                model.check(store[name])
            store.verify()

    @precondition(lambda self: self.on_disk)
    @rule(is_read=st.booleans(), is_shown=st.booleans())
    def follow(self, is_read: bool, is_shown: bool) -> None:
        """A newer version is made ready, and given up or shown; rows may be read before."""
        self.settle()
        found = self.follower.find_newer()
        if found is not None and is_read:
            for name, model in self.followed.items():
                model.check(self.follower[name])
        if found is not None and is_shown:
            assert found.show() == self.version
            self.followed = self.show(self.version)
        elif found is not None:
            found.close()
        assert self.followed.keys() == self.follower.tables.keys()
        for name, model in self.followed.items():
            model.check(self.follower[name])

    @invariant()
    def counts_agree(self) -> None:
        for table in self.store.tables.values() if hasattr(self, "store") else ():
            with table.pool.arena.lock:
                table.pool.cache.check_integrity()
            table.pool.tier.check_integrity()
            if self.pending is None or self.pending.done():
                assert not table.pool.in_use

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.live.keys() == self.store.tables.keys()
        for name, model in self.live.items():
            model.check(self.store[name])
        self.store.verify()
        self.store.close()
        if self.follower is not None:
            self.follower.close()
        shutil.rmtree(self.folder)


TestStore = StoreMachine.TestCase
TestStore.settings = TestStore.settings.__class__(max_examples=40 if JIT_ENABLED else 3, stateful_step_count=30)
