"""A reader that follows a writer: what comes between finding a newer version and showing it, and random histories."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.following import DIM, EVERY, ROWS, Writer, expected, first_values
from tierstore import errors
from tierstore.io.follower import NewerCommit
from tierstore.store import Store

SECONDS = 60.0
CHANGED = [1, 2, 3]


def commit_changed(writer: Writer) -> None:
    writer("write", "t", CHANGED, 5)
    writer("commit", 2)


def require_nothing_held(store: Store) -> None:
    """No second snapshot."""
    assert store._follower._found is store._cold._follower.found is None


def test_only_what_the_last_call_found_is_shown_and_once(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        store["t"].read(EVERY)
        commit_changed(writer)
        first = store.find_newer()
        writer("write", "t", [1000], 6)
        writer("commit", 3)
        second = store.find_newer()
        assert first is not None
        assert second is not None
        with pytest.raises(errors.ClosedError, match="version 2 was shown or given up"):
            first.show()
        first.close()
        assert torch.equal(store["t"].read(EVERY), expected())
        assert second.show() == 3
        with pytest.raises(errors.ClosedError, match="version 3 was shown or given up"):
            second.show()
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED, _6=[1000]))
        require_nothing_held(store)


def test_what_is_given_up_holds_nothing(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="440KiB") as store:
        store["t"].read(EVERY)
        commit_changed(writer)
        found = store.find_newer()
        assert found is not None
        found.close()
        require_nothing_held(store)
        with pytest.raises(errors.ClosedError):
            found.show()
        assert store.find_newer() is not None
        writer("rollback", 1)
        assert store.find_newer() is None
        require_nothing_held(store)
        assert torch.equal(store["t"].read(EVERY), expected())


def test_a_table_that_cannot_be_kept_leaves_the_store_as_it_was(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="4MiB", dtype="float32") as store:
        store["t"].read(EVERY)
        writer("create", "u", 50, 16, "float16")
        commit_changed(writer)
        for _ in range(2):
            with pytest.raises(errors.TableError, match="'u': rows stored as float16 cannot be kept as float32"):
                store.refresh()
            assert (store.version, list(store.tables)) == (1, ["t"])
            assert torch.equal(store["t"].read(EVERY), expected())
            require_nothing_held(store)


def test_a_row_that_cannot_be_kept_leaves_the_store_as_it_was(writer: Writer, store_dir: Path) -> None:
    with tierstore.open(store_dir, mode="r", ddr="4MiB", dtype="float16") as store:
        store["t"].read(EVERY)
        writer("write", "t", [11], 1e30)
        writer("commit", 2)
        with pytest.raises(errors.DamagedError, match="row 11 of table 't'"):
            store.find_newer()
        require_nothing_held(store)
        assert torch.equal(store["t"].read(EVERY), expected().half())
        writer("rollback", 1)
        writer("write", "t", CHANGED, 5)
        assert writer("commit", 3) == store.refresh() == 3
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED).half())


def test_tables_that_are_stored_differently_and_kept_alike(writer: Writer, store_dir: Path) -> None:
    writer("create", "u", 50, DIM, "float16")
    writer("write", "u", [6, 7], 5)
    writer("commit", 2)
    with tierstore.open(store_dir, mode="r", ddr="4MiB", dtype="float16") as store:
        assert store["u"].pool is store["t"].pool
        store["t"].read(EVERY)
        assert (store["u"].read(torch.tensor([6, 7])) == 5).all()
        writer("write", "t", CHANGED, 5)
        writer("write", "u", [7], 6)
        assert writer("commit", 3) == store.refresh() == 3
        assert torch.equal(store["t"].read(EVERY), expected(_5=CHANGED).half())
        assert store["u"].read(torch.tensor([6, 7]))[:, 0].tolist() == [5, 6]


def test_close_waits_for_what_is_being_read(writer: Writer, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tierstore.open(store_dir, mode="r", ddr="4MiB")
    store["t"].read(EVERY)
    commit_changed(writer)
    is_reading, may_read, read = threading.Event(), threading.Event(), NewerCommit.read

    def read_slowly(*arguments: Any) -> None:
        is_reading.set()
        assert may_read.wait(SECONDS)
        read(*arguments)

    monkeypatch.setattr(NewerCommit, "read", read_slowly)
    found: list[Any] = []
    finder = threading.Thread(target=lambda: found.append(store.find_newer()))
    finder.start()
    assert is_reading.wait(SECONDS)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    may_read.set()
    for thread in (finder, closer):
        thread.join(SECONDS)
        assert not thread.is_alive()
    with pytest.raises(errors.ClosedError, match="is closed"):
        found[0].show()
    found[0].close()


class History:
    """What each version of a store holds, told from the orders that its writer gets."""

    def __init__(self, writer: Writer, directory: Path, seed: int) -> None:
        self._writer, self._directory = writer, str(directory)
        self._random = random.Random(seed)
        self._value = 0
        self._current = {"t": first_values(), "u": first_values(1)}
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self._kept: list[int] = []
        self._open()
        for name in self._current:
            writer("create", name, ROWS, DIM)
        self._commit()

    def _open(self) -> None:
        self._keep = self._random.randint(1, 3)
        self._writer("open", self._directory, self._keep)

    def _commit(self) -> None:
        version = self._writer("commit", 0)
        self.versions[version] = {name: rows.clone() for name, rows in self._current.items()}
        self._kept = [*self._kept, version][-self._keep :]

    def _write(self) -> None:
        self._value += 1
        name, first = self._random.choice(list(self._current)), self._random.randrange(ROWS)
        step, count = self._random.choice([1, 7]), self._random.choice([1, 40, 1000])
        ids = sorted({(first + step * i) % ROWS for i in range(count)})
        self._writer("write", name, ids, self._value)
        self._current[name][ids] = float(self._value)

    def _return_to(self, version: int) -> None:
        self._current = {name: rows.clone() for name, rows in self.versions[version].items()}

    def go_on(self) -> None:
        """Write, commit, go back, or open again without a commit."""
        action = self._random.random()
        if action < 0.5:
            self._write()
        elif action < 0.85:
            self._commit()
        elif action < 0.95:
            version = self._random.choice(self._kept)
            assert self._writer("rollback", version) == version
            self._kept = [kept for kept in self._kept if kept <= version]
            self._return_to(version)
        else:
            self._open()
            self._return_to(self._kept[-1])


class Lookups(threading.Thread):
    """Reads until it is told to stop, and compares."""

    def __init__(self, store: Store, want: dict[str, torch.Tensor], seed: int) -> None:
        super().__init__()
        self._store, self._want, self._random = store, want, np.random.default_rng(seed)
        self._is_over = threading.Event()
        self.wrong: list[object] = []

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                ids = torch.from_numpy(self._random.integers(0, ROWS, self._random.choice([1, 30, 400])))
                for name, want in self._want.items():
                    if not torch.equal(self._store[name].read(ids), want[ids]):
                        self.wrong.append((name, ids))
        except BaseException as error:
            self.wrong.append(error)

    def end(self) -> None:
        self._is_over.set()
        self.join(SECONDS)
        assert not self.is_alive()
        assert not self.wrong


@pytest.mark.parametrize(
    ("ddr", "dtype", "policy"),
    [("4MiB", None, "lru"), ("700KiB", "stored", "lfu"), ("600KiB", "float16", "tinylfu"), ("4MiB", "float16", "lru")],
)
def test_random_histories(writer_process: Writer, store_dir: Path, ddr: str, dtype: Any, policy: str) -> None:
    history, chance = History(writer_process, store_dir, seed=3), random.Random(4)
    shown = 0
    with tierstore.open(store_dir, mode="r", ddr=ddr, dtype=dtype, policy=policy) as store:
        for seed in range(60):
            for _ in range(chance.randint(0, 3)):
                history.go_on()
            want = {
                name: rows.to(store[name].layout.torch_dtype) for name, rows in history.versions[store.version].items()
            }
            lookups = Lookups(store, want, seed)
            lookups.start()
            found = store.find_newer()
            if chance.random() < 0.3:
                history.go_on()
            lookups.end()
            if found is not None and chance.random() < 0.8:
                version = found.show()
                shown += 1
                for name, rows in history.versions[version].items():
                    table = store[name]
                    assert torch.equal(
                        table.pooled(EVERY, torch.arange(ROWS + 1)), rows.to(table.layout.torch_dtype).float()
                    )
            store["t"].pool.cache.check_integrity()
        store.verify()
    writer_process("close")
    assert shown > 10


def test_a_table_that_goes_while_its_pool_is_asked_for_is_gone(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierstore.open(store_dir, ddr="2MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="going", num_embeddings=9, embedding_dim=4))
        find = store.pool_of

        def overtaken(layout: Any) -> Any:
            table.leave()
            return find(layout)

        monkeypatch.setattr(store, "pool_of", overtaken)
        table.read(torch.arange(3))  # began before
        with pytest.raises(errors.TableError, match="not in the version"):
            table.read(torch.arange(3))
