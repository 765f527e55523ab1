"""The whole store against a dict: any order of writes, reads, training steps, commits, reopenings and rollbacks.

The model shares nothing with the store but the first values of rows, which ``test_init`` checks on their own.
"""

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tierstore
from tests.packed import pack_store
from tierstore import optim
from tierstore.kernels.jit import JIT_ENABLED

ROWS = 300
LR = 0.5
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KEEP = 3
ids = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=150)
names = st.sampled_from(["one", "two", "three"])
hbms = st.sampled_from(["0", "0", "64KiB", "96KiB"])
DDR = "560KiB"


class StoreMachine(RuleBasedStateMachine):
    """``live`` is what reads must show, ``saved`` what each kept version must show, by its number."""

    @initialize(
        policy=st.sampled_from(["lru", "lfu", "tinylfu"]),
        threads=st.integers(1, 3),
        hbm=hbms,
    )
    def open(self, policy: str, threads: int, hbm: str) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.settings: dict[str, Any] = {"policy": policy, "threads": threads, "ddr": DDR, "keep": KEEP, "hbm": hbm}
        self.store = tierstore.open(self.directory / "store", **self.settings)
        self.live: dict[str, dict[int, torch.Tensor]] = {}
        self.saved: dict[int, dict[str, dict[int, torch.Tensor]]] = {0: {}}
        self.saved_extra: dict[int, dict[str, int]] = {0: {}}
        self.first: dict[str, torch.Tensor] = {}
        self.last_version = 0
        self.pending: Future[int] | None = None

    @rule(name=names, dtype=st.sampled_from(sorted(DTYPES)), dim=st.integers(1, 9))
    def create(self, name: str, dtype: Any, dim: int) -> None:
        if name in self.live:
            return
        config = tierstore.TableConfig(
            name=name, num_embeddings=ROWS, embedding_dim=dim, dtype=dtype,
            init=tierstore.init.Uniform(-1, 1, seed=len(self.live)), optimizer=optim.SGD(lr=LR),
        )  # fmt: skip
        table = self.store.create_table(config)
        self.first[name] = table.read(torch.arange(ROWS))
        self.live[name] = {}

    def expected(self, name: str, rows: list[int], version: int | None = None) -> torch.Tensor:
        shown = self.live if version is None else self.saved[version]
        return torch.stack([shown.get(name, {}).get(row, self.first[name][row]) for row in rows])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def write(self, data: st.DataObject, rows: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        values = torch.randn(len(rows), self.first[name].shape[1]).to(self.first[name].dtype)
        self.store[name].write(torch.tensor(rows), values)
        for row, value in zip(rows, values, strict=True):
            self.live[name][row] = value

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def read(self, data: st.DataObject, rows: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert torch.equal(self.store[name].read(torch.tensor(rows)), self.expected(name, rows))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=ids)
    def train(self, data: st.DataObject, rows: list[int]) -> None:
        """One bag of all rows, loss = sum: each row's gradient is how often it occurs."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        bag = tierstore.TieredEmbeddingBag(self.store[name], mode="sum")
        out = bag(torch.tensor([rows]))
        total = np.zeros(self.first[name].shape[1], np.float32)
        for value in self.expected(name, rows):
            total += value.float().numpy()
        assert np.array_equal(out[0].detach().numpy(), total)
        out.sum().backward()
        for row in set(rows):
            old = self.live[name].get(row, self.first[name][row])
            step = torch.tensor(LR * rows.count(row))
            self.live[name][row] = (old.float() - step).to(old.dtype)

    @rule(extra=st.integers(0, 1000), wait=st.booleans())
    def commit(self, extra: int, wait: bool) -> None:
        """In the background, if it is not waited for: what follows belongs to the next version."""
        self.settle()
        self.last_version += 1
        if wait:
            assert self.store.commit(extra={"number": extra}) == self.last_version
        else:
            self.pending = self.store.commit_async(extra={"number": extra})
        self.saved[self.last_version] = {name: dict(rows) for name, rows in self.live.items()}
        self.saved_extra[self.last_version] = {"number": extra}
        for version in sorted(self.saved)[:-KEEP]:
            del self.saved[version]

    def settle(self) -> None:
        if self.pending is not None:
            assert self.pending.result() == self.last_version
            self.pending = None

    @property
    def version(self) -> int:
        return max(self.saved)

    @rule(policy=st.sampled_from(["lru", "tinylfu"]), ddr=st.sampled_from([DDR, "4MiB"]), hbm=hbms)
    def reopen(self, policy: str, ddr: str, hbm: str) -> None:
        self.store.close()
        self.pending = None
        self.settings |= {"policy": policy, "ddr": ddr, "hbm": hbm}
        self.store = tierstore.open(self.directory / "store", **self.settings)
        self.show_version()

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 9))
    def pack(self, seed: int) -> None:
        """Go on with a copy whose rows lie in another order."""
        self.store.close()
        self.pending = None
        pack_store(self.directory / "store", seed)
        self.store = tierstore.open(self.directory / "store", **self.settings)
        self.show_version()

    @precondition(lambda self: self.version)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.saved.keys() - {0})))
        self.store.rollback(version)
        self.pending = None
        self.saved = {kept: rows for kept, rows in self.saved.items() if kept <= version}
        self.show_version()

    def show_version(self) -> None:
        self.live = {name: dict(self.saved[self.version].get(name, {})) for name in self.live}
        assert self.store.version == self.version
        assert self.store.versions == tuple(sorted(self.saved.keys() - {0}))
        assert self.store.extra == self.saved_extra[self.version]

    @precondition(lambda self: self.version)
    @rule(data=st.data())
    def look_back(self, data: st.DataObject) -> None:
        """Every kept version stays as it was, for readers beside the writer."""
        self.settle()
        version = data.draw(st.sampled_from(sorted(self.saved.keys() - {0})))
        copy = Path(shutil.copytree(self.directory / "store", self.directory / "copy"))
        with tierstore.open(copy, mode="r", version=version, ddr=DDR) as store:
            assert (store.version, store.extra) == (version, self.saved_extra[version])
            for name in self.live:
                shown = store[name].read(torch.arange(ROWS))
                assert torch.equal(shown, self.expected(name, list(range(ROWS)), version))
            store.verify()
        shutil.rmtree(copy)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        for table in self.store.tables.values():
            with table.pool.arena.lock:
                table.pool.cache.check_integrity()
            table.pool.tier.check_integrity()
            if self.pending is None or self.pending.done():
                assert not table.pool.in_use

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for name in self.live:
            assert torch.equal(self.store[name].read(torch.arange(ROWS)), self.expected(name, list(range(ROWS))))
        self.store.verify()
        self.store.close()
        shutil.rmtree(self.directory)


TestStore = StoreMachine.TestCase
TestStore.settings = TestStore.settings.__class__(max_examples=30 if JIT_ENABLED else 3, stateful_step_count=25)
