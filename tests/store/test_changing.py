"""Tables that grow, get other names and optimizers, and go: against plain arrays, killed at each step, and followed."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.children import run
from tierstore import optim
from tierstore.dist.reshard import reshard
from tierstore.errors import TableError
from tierstore.init import Uniform
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import KEY_ROW_BITS
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.updates.apply import apply_update
from tierstore.updates.delta import write_update

DIM, LR, DDR, KEEP = 4, 0.5, "1MiB", 3
RULES = [optim.SGD(lr=LR), optim.Adagrad(lr=LR), optim.RowWiseAdagrad(lr=LR)]


def first_values(place: int, num_rows: int) -> Any:
    keys = np.arange(num_rows) | (place << KEY_ROW_BITS)
    out = np.zeros((num_rows, DIM), np.float32)
    Uniform(-1, 1, seed=9).fill(keys, np.arange(num_rows, dtype=np.int32), out, DIM, 0)
    return out


class Twin:
    """One table in arrays. ``born`` is the place that it was created in."""

    def __init__(self, born: int, config: tierstore.TableConfig) -> None:
        self.born, self.config = born, config
        self.weights = first_values(born, config.num_embeddings)
        self.written: set[int] = set()
        self.restart()

    def restart(self) -> None:
        self.state = np.zeros((len(self.weights), self.config.optimizer.state_dim(DIM)), np.float32)

    def grow(self, num_rows: int) -> None:
        more = first_values(self.born, num_rows)[len(self.weights) :]
        self.weights = np.concatenate([self.weights, more])
        self.state = np.concatenate([self.state, np.zeros((len(more), self.state.shape[1]), np.float32)])

    def train(self, ids: Any) -> None:
        rows, counts = np.unique(ids, return_counts=True)
        gradient = np.repeat(counts.astype(np.float32)[:, None], DIM, axis=1)
        rate, rule = np.float32(LR), self.config.optimizer
        if isinstance(rule, optim.RowWiseAdagrad):  # so is Adagrad; the gradient is the same in all columns
            self.state[rows] += gradient[:, : self.state.shape[1]] ** 2
            root = np.sqrt(self.state[rows]) + np.float32(rule.eps)
            self.weights[rows] -= rate * gradient / root if root.shape[1] == DIM else rate / root * gradient
        else:
            self.weights[rows] -= rate * gradient
        self.written |= set(rows.tolist())

    def copy(self) -> "Twin":
        other = Twin.__new__(Twin)
        other.__dict__ = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(self).items()}
        return other

    def check(self, table: tierstore.Table) -> None:
        every = torch.arange(len(self.weights))
        assert (table.config.num_embeddings, table.config.name) == (len(every), self.config.name)
        assert np.array_equal(table.read(every).numpy(), self.weights)
        assert np.array_equal(table.read_state(every).numpy(), self.state)
        assert {int(row) for part in table.written() for row in part} == self.written


class Machine:
    """A store, its twins by name, those of each kept version by birth, and a reader that follows."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = np.random.default_rng(seed), folder
        self.twins: dict[str, Twin] = {}
        self.saved: dict[int, dict[int, Twin]] = {}
        self.names = 0
        self.open()
        for _ in range(3):
            self.create()
        self.follower = tierstore.open(folder / "store", mode="r", ddr=DDR)
        self.followed: dict[str, Twin] = {name: twin.copy() for name, twin in self.twins.items()}

    def open(self) -> None:
        self.store = tierstore.open(self.folder / "store", ddr=DDR, keep=KEEP)

    def new_name(self) -> str:
        self.names += 1
        return f"table {self.names}"

    def any_name(self) -> str:
        return str(self.draw.choice(sorted(self.twins)))

    def create(self) -> None:
        config = tierstore.TableConfig(
            name=self.new_name(), num_embeddings=int(self.draw.integers(1, 200)), embedding_dim=DIM,
            init=Uniform(-1, 1, seed=9), optimizer=self.draw.choice(RULES),
        )  # fmt: skip
        table = self.store.create_table(config)
        self.twins[config.name] = Twin(table.index, config)

    def train(self) -> None:
        for name in {self.any_name(), self.any_name()}:
            twin = self.twins[name]
            ids = self.draw.integers(0, len(twin.weights), 30)
            bag = tierstore.TieredEmbeddingBag(self.store[name], mode="sum")
            bag(torch.from_numpy(ids[None])).sum().backward()
            twin.train(ids)

    def commit(self) -> None:
        version = self.store.commit()
        self.saved[version] = {twin.born: twin.copy() for twin in self.twins.values()}
        self.saved = {kept: self.saved[kept] for kept in sorted(self.saved)[-KEEP:]}

    def show(self, version: int) -> dict[str, Twin]:
        """The tables of now as they are in a version."""
        shown = {}
        for name, twin in self.twins.items():
            own = Twin(twin.born, twin.config)
            if (then := self.saved.get(version, {}).get(twin.born)) is not None:
                own.weights[: len(then.weights)], own.state[: len(then.state)] = then.weights, then.state
                own.written = set(then.written)
            shown[name] = own
        return shown

    def rollback(self) -> None:
        if self.saved:
            version = int(self.draw.choice(sorted(self.saved)))
            self.store.rollback(version)
            self.saved = {kept: twins for kept, twins in self.saved.items() if kept <= version}
            self.twins = self.show(version)

    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.twins = self.show(self.store.version)

    def _change(self, more: int = 0, **asked: Any) -> None:
        name = self.any_name()
        asked |= {"num_embeddings": len(self.twins[name].weights) + more} if more else {}
        twin = self.twins.pop(name)
        twin.config = self.store.change_table(name, **asked).config
        self.twins[twin.config.name] = twin
        if len(twin.weights) < twin.config.num_embeddings:
            twin.grow(twin.config.num_embeddings)
        if "optimizer" in asked and twin.state.shape[1] != twin.config.optimizer.state_dim(DIM):
            twin.restart()
            if self.store.version:
                self.saved = {self.store.version: {each.born: each.copy() for each in self.twins.values()}}

    def change(self) -> None:
        if self.store.changed_tables:
            with pytest.raises(TableError, match=r"changed since the last commit"):
                self.store.drop_table(self.any_name())
            self.commit()
        kind = self.draw.integers(0, 4)
        if kind == 0:
            self._change(name=self.new_name())
        elif kind == 1:
            self._change(more=int(self.draw.integers(1, 100)))
        elif kind == 2:
            self._change(optimizer=self.draw.choice(RULES))
        elif len(self.twins) > 1:
            name = self.any_name()
            self.store.drop_table(name)
            del self.twins[name]

    def follow(self) -> None:
        for name, twin in self.followed.items():
            twin.check(self.follower[name])
        before = self.follower.version, tuple(self.follower.tables)
        self.follower.refresh()
        if (self.follower.version, tuple(self.follower.tables)) != before:
            self.followed = self.show(self.follower.version)
        assert self.follower.version == self.store.version
        assert self.followed.keys() == self.follower.tables.keys()
        for name, twin in self.followed.items():
            twin.check(self.follower[name])

    def look_back(self) -> None:
        for version in self.saved:
            with tierstore.open(self.folder / "store", mode="r", version=version, ddr=DDR) as store:
                for name, twin in self.show(version).items():
                    twin.check(store[name])
                store.verify()

    def check(self) -> None:
        assert self.twins.keys() == self.store.tables.keys()
        for name, twin in self.twins.items():
            twin.check(self.store[name])


@pytest.mark.parametrize("seed", range(4 if JIT_ENABLED else 1))
def test_any_order_of_changes_against_arrays(tmp_path: Path, seed: int) -> None:
    machine = Machine(tmp_path, seed)
    steps = [machine.train] * 4 + [machine.commit] * 2 + [machine.change] * 3
    steps += [machine.create, machine.rollback, machine.reopen, machine.follow, machine.follow, machine.look_back]
    for _ in range(60):
        step: Callable[[], None] = steps[machine.draw.integers(0, len(steps))]
        step()
    machine.check()
    machine.follow()
    machine.look_back()
    machine.commit()
    machine.store.backup(tmp_path / "backup")
    machine.store.verify()
    machine.follower.close()
    machine.store.close()
    with tierstore.open(tmp_path / "backup", mode="r", ddr=DDR) as store:
        for name, twin in machine.twins.items():
            twin.check(store[name])


CHANGES = {
    "grow": 'store.change_table("a", num_embeddings=500, name="c")',
    "drop": 'store.drop_table("a")',
    "optimizer": 'store.change_table("a", optimizer=tierstore.optim.Adam())',
    "ids": 'store.change_table("d", num_embeddings=70, optimizer=tierstore.optim.Adam())',
    "rules": 'store.change_table("d", ids=tierstore.DynamicIds(admission=tierstore.ids.Frequency(3, 90)))',
}
KILLED = """
    import json, shutil
    from tests.faults.training_run import watch_names
    from tierstore.system import killpoints

    def change(directory, code, last):
        reached = 0
        def hook(name):
            nonlocal reached
            reached += 1
            if reached == last:
                os._exit(9)
        with tierstore.open(directory, ddr="1MiB", keep=3) as store:
            if last is not None:
                killpoints.hook = hook
                watch_names(hook)
            exec(code)
            return reached

    def copied(name):
        return shutil.copytree(sys.argv[1], Path(sys.argv[1]).parent / name)

    changes = json.loads(sys.argv[2])
    for code in changes.values():  # compiles what children use
        change(copied(f"warm {len(code)}"), code, None)
    for kind, code in changes.items():
        read, write = os.pipe()
        if not os.fork():
            os.write(write, str(change(copied(f"{kind} done"), code, -1)).encode())
            os._exit(0)
        os.wait()
        for last in range(1, int(os.read(read, 9)) + 1):
            forked(change, copied(f"{kind} {last}"), code, last)
    """


@pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")
def test_a_change_that_is_killed_at_any_step_leaves_the_old_table_or_the_new_one(tmp_path: Path) -> None:
    config = tierstore.TableConfig(name="a", num_embeddings=200, embedding_dim=DIM, optimizer=optim.Adagrad())
    with tierstore.open(tmp_path / "store", ddr=DDR, keep=3) as store:
        tables = [store.create_table(replace(config, name=name, feature_names=())) for name in ("a", "b")]
        rules = tierstore.DynamicIds(admission=tierstore.ids.Frequency(2))
        dynamic = store.create_table(replace(config, name="d", feature_names=(), num_embeddings=60, ids=rules))
        for _ in range(2):
            for table in tables:
                table.write(torch.arange(50), torch.randn(50, DIM))
            dynamic.admit(torch.arange(-20, 30))
            store.commit(extra={"k": 1}, tensors={"w": torch.ones(3)})
        before = [table.read(torch.arange(200)) for table in (*tables, dynamic)]
    run(KILLED, tmp_path / "store", json.dumps(CHANGES))
    for kind, steps in {"grow": 2, "drop": 2, "optimizer": 15, "ids": 15, "rules": 2}.items():
        ends = Counter[Any]()
        for path in tmp_path.glob(f"{kind} *"):
            with tierstore.open(path, ddr=DDR, keep=3) as store:
                shown = {name: each.config for name, each in store.tables.items()}
                ends[
                    tuple((name, each.num_embeddings, each.optimizer.kind, each.ids) for name, each in shown.items())
                ] += 1
                for name, rows in (("b", before[1]), ("d", before[2])):
                    assert torch.equal(store[name].read(torch.arange(200)), rows)
                for name in {"a", "c"} & store.tables.keys():
                    assert torch.equal(store[name].read(torch.arange(200)), before[0])
                    assert torch.equal(torch.cat([*store[name].written()]), torch.arange(50))
                assert (store.extra, store.tensors()["w"].tolist()) == ({"k": 1}, [1, 1, 1])
                store["b"].write(torch.tensor([7]), torch.ones(1, DIM))
                store.commit()
                store.verify()
        assert len(ends) == 2
        assert ends.total() > steps


def test_every_copy_of_a_store_whose_tables_changed_has_their_rows(tmp_path: Path) -> None:
    """Also rows never written, whose first values are those of the place that the table was in first."""
    source = tmp_path / "store"
    with tierstore.open(source, ddr=DDR) as store:
        for name, rule in zip("abcd", [*RULES, optim.SGD()], strict=True):
            config = tierstore.TableConfig(name=name, num_embeddings=90, embedding_dim=DIM, optimizer=rule)
            store.create_table(config).write(torch.arange(30), torch.randn(30, DIM))
        store.commit()
        store.change_table("c", name="e", num_embeddings=120)
        store.change_table("b", optimizer=optim.Adam())
        store.drop_table("a")
        with store.record(tmp_path / "trace.npz", rate=1) as recorder:
            rows = {name: table.read(torch.arange(90)) for name, table in store.tables.items()}
        store.commit()
    assert set(recorder._recorded.contents().trace().tables) == {"e", "b", "d"}
    update = write_update(source, tmp_path / "update")
    apply_update(tmp_path / "replica", update.path)
    compact_store(source, tmp_path / "compact", trace=tmp_path / "trace.npz")
    salvage(source, tmp_path / "repaired")
    reshard(source, tmp_path / "ranks", plan=None, num_ranks=2, progress=lambda _done, _total: None)
    reshard(tmp_path / "ranks", tmp_path / "plain", plan=None, num_ranks=0, progress=lambda _done, _total: None)
    half = tierstore.quantize(source, tmp_path / "half", dtype="float16")
    assert {table.name for table in half.tables} == rows.keys()
    for name in ("store", "replica", "compact", "repaired", "ranks", "plain", "half"):
        with tierstore.open(tmp_path / name, mode="r", ddr=DDR) as store:
            assert store.tables.keys() == rows.keys()
            for table, shown in rows.items():
                assert torch.equal(store[table].read(torch.arange(90)), shown.half() if name == "half" else shown)
                assert torch.equal(torch.cat([*store[table].written()]), torch.arange(30))
            store.verify()
    with tierstore.open(source, ddr=DDR) as store:
        store.change_table("b", num_embeddings=91)
        store.commit()
    with pytest.raises(TableError, match=r"new, empty directory"):
        apply_update(
            tmp_path / "replica", write_update(source, tmp_path / "next", since=update.header.origin.version).path
        )
    for name in ("replica", "ranks/0-of-2"):
        with tierstore.open(tmp_path / name, ddr=DDR) as store, pytest.raises(TableError, match=r"reshard|published"):
            store.drop_table("d")


@pytest.mark.parametrize("tiers", [{"cold": "memory"}, {"hbm": "1MiB"}, {"hbm": "96KiB", "ddr": "2MiB"}])
def test_tables_of_every_tier_change_and_those_of_before_are_refused(tmp_path: Path, tiers: dict[str, Any]) -> None:
    directory, ids = None if "cold" in tiers else tmp_path / "store", torch.arange(1000)
    with tierstore.open(directory, **{"ddr": "8MiB", **tiers}) as store:
        config = tierstore.TableConfig(name="a", num_embeddings=1000, embedding_dim=DIM, optimizer=optim.Adagrad())
        bag = tierstore.TieredEmbeddingBag(store.create_table(config))
        bag(ids.view(100, 10)[:50]).sum().backward()
        store.commit()
        rows = store["a"].read(ids)
        with pytest.raises(ValueError, match="must be at least 1000"):
            store.change_table("a", num_embeddings=999)
        held = bag(ids[None, :3])
        with pytest.raises(TableError, match="in use"):
            store.change_table("a", num_embeddings=1500)
        del held
        store.change_table("a", num_embeddings=1500)
        made = store.change_table("a", optimizer=optim.Adam())
        with pytest.raises(TableError, match="take it again"):
            bag(ids[None])
        assert torch.equal(made.read(ids), rows)
        assert not made.read_state(ids).any()
        tierstore.TieredEmbeddingBag(made)(torch.tensor([[1, 1499]])).sum().backward()
        assert [each.tolist() for each in made.written()] == [[*range(500), 1499]]
        assert made.read_state(torch.tensor([1, 2])).any(dim=1).tolist() == [True, False]
