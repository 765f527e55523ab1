"""A dict that takes the changes of a store equals the store at the version that it acknowledged, bit for bit: over any
history of tables, ids, commits and rollbacks, however often what takes them is killed or lags behind.
"""

import contextlib
import pickle
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import tierstore
from tests.children import fork
from tests.following import Child
from tierstore import errors
from tierstore.io import reads
from tierstore.store import version as versions
from tierstore.store.changes import Change
from tierstore.system import killpoints

SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
ROWS, SLOTS, LINEAGE = 300, 150, 4
Contents = dict[str, dict[int, bytes]]


def rows_as_bytes(ids: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[int, bytes]]:
    return zip(ids.tolist(), map(bytes, values.contiguous().view(torch.uint8).numpy()), strict=True)


def contents(path: Path) -> Contents:
    """All rows of the newest commit, as a store opened for reading has them; no table without rows."""
    found: Contents = {}
    with tierstore.open(path, mode="r", **SMALL) as store:
        for name, table in store.tables.items():
            for ids in filter(len, table.written()):
                found.setdefault(name, {}).update(rows_as_bytes(ids, table.read(ids)))
    return found


class Receiver:
    """A dict by changes alone; and where its cursor must be: what it acknowledged and was told, as (version, identity),
    and the tables of then."""

    def __init__(self) -> None:
        self.tables: Contents = {}
        self.acked: tuple[int, str] | None = None
        self.told: tuple[int, str] | None = None
        self.known: set[tuple[str, int]] = set()

    def take(self, change: Change, stop: int | None = None) -> bool:
        """All of it, or so many batches; whether it was all. No id comes twice."""
        seen = set[tuple[str, int]]()
        if change.is_full:
            self.tables.clear()
        for name in change.dropped:
            self.tables.pop(name, None)
        for number, (name, ids, values) in enumerate(change.rows()):
            if number == stop:
                return False
            rows, new = self.tables.setdefault(name, {}), {(name, each) for each in ids.tolist()}
            assert len(seen | new) == len(seen) + len(ids)
            seen |= new
            if values is not None:
                rows.update(rows_as_bytes(torch.from_numpy(ids), values))
            for gone in ids.tolist() if values is None else ():
                rows.pop(gone, None)
        return True

    @property
    def contents(self) -> Contents:
        return {name: rows for name, rows in self.tables.items() if rows}


class Killed(BaseException):
    pass


class History:
    """A store that anything may happen to, and its consumers: one that comes often, one that lags, and one whose feed
    stays open, which sees changes of tables with the next commit."""

    def __init__(self, path: Path, random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.random, self.monkeypatch, self.count = path, random, monkeypatch, 0
        self.receivers = {name: Receiver() for name in ("often", "seldom", "open")}
        self.store = tierstore.open(path, keep=3, **SMALL)
        self.reader = tierstore.open(path, mode="r", **SMALL)
        self.feed = self.reader.changes("open")
        while len(self.store.tables) < 2:
            self.create()
        self.commit()

    def create(self) -> None:
        """Under a name that another table may have had."""
        self.count += 1
        name, rules = f"t{self.random.randint(0, 4)}", tierstore.DynamicIds() if self.count % 2 else None
        size, dim = SLOTS if rules else ROWS, self.random.randint(1, 5)
        if name not in self.store:
            dtype = self.random.choice(["float32", "float16", "bfloat16"])
            shape: dict[str, Any] = {"num_embeddings": size, "embedding_dim": dim, "dtype": dtype, "ids": rules}
            self.store.create_table(tierstore.TableConfig(name=name, **shape))

    def train(self) -> None:
        table = self.store[self.random.choice(list(self.store))]
        ids = torch.tensor([self.random.randrange(ROWS) for _ in range(self.random.randint(1, 30))])
        if table.ids is not None:
            table.admit(ids := (ids - 100) * 2**54)
            ids = ids[torch.isin(ids, torch.from_numpy(table.ids.listed()))]
        table.write(ids, torch.randn(len(ids), table.config.embedding_dim))

    def evict(self) -> None:
        for table in self.store.tables.values():
            if table.ids is not None:
                table.evict(torch.from_numpy(table.ids.listed()[:: self.random.randint(1, 9)].copy()))

    def commit(self) -> None:
        self.store.commit()

    def change_table(self) -> None:
        """The change is part of no commit; one may follow."""
        self.commit()
        name, what = self.random.choice(list(self.store)), self.random.choice(["grow", "rename", "rename", "drop"])
        if what == "grow":
            self.store.change_table(name, num_embeddings=self.store[name].config.num_embeddings + 7)
        elif what == "rename" and (new := f"t{self.random.randint(0, 4)}") not in self.store:
            self.store.change_table(name, name=new)
        elif what == "drop" and len(self.store.tables) > 2:
            self.store.drop_table(name)
        if self.random.random() < 0.5:
            self.commit()

    def roll_back(self) -> None:
        self.store.rollback(self.random.choice(self.store.versions))

    def reopen(self) -> None:
        self.store.close()
        self.store = tierstore.open(self.path, keep=3, **SMALL)

    def follow(self) -> None:
        receiver = self.receivers["open"]
        for change in self.feed:
            receiver.take(change)
            change.ack()
            assert change.version == self.reader.version == self.store.version
            assert receiver.contents == contents(self.path)

    def needs_full(self, of: Receiver) -> bool:
        known = [of.acked, of.told or of.acked]
        return not all(each and self.store.commit_id(each[0]) == each[1] for each in known)

    def consume(self, name: str = "often", *, is_killed: bool = True) -> None:
        receiver, random, store, reached = self.receivers[name], self.random, self.store, set[str]()
        at = store.version, store.commit_id(store.version)
        tables = {(each.name, each.index) for each in store.tables.values()}
        is_new = (receiver.told, receiver.acked, receiver.known) != (None, at, tables)
        needs_full, point, stop = self.needs_full(receiver), "", None
        if is_killed:
            point, stop = random.choice([*killpoints.FEED_POINTS, *[""] * 4]), random.choice([None, None, 0, 1, 3])

        def hook(name: str) -> None:
            reached.add(name)
            if name == point:
                raise Killed

        with self.monkeypatch.context() as patched, contextlib.suppress(Killed), store.changes(name) as feed:
            patched.setattr(killpoints, "hook", hook)
            for change in feed:
                assert (change.is_full, change.version) == (needs_full, at[0])
                if receiver.take(change, stop):
                    assert receiver.contents == contents(self.path)
                    change.ack()
        assert ("feed: change noted" in reached) == is_new
        if "feed: acknowledged" in reached:
            receiver.acked, receiver.told, receiver.known = at, None, tables
        elif is_new:
            receiver.acked = None if needs_full or receiver.known != tables else receiver.acked
            receiver.told = at
        stands = None if self.needs_full(receiver) else receiver.acked
        assert store.consumers()[name] == (stands[0] if stands else 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_dict_that_takes_changes_is_the_store(store_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(versions, "MAX_ANCESTORS", LINEAGE)
    monkeypatch.setattr(reads, "CHUNK_BYTES", 400)
    history = History(store_dir, Random(seed), monkeypatch)
    steps = [
        *[history.train] * 6, *[history.commit] * 4, *[history.consume] * 5, history.follow, history.evict,
        history.create, history.change_table, history.roll_back, history.reopen, lambda: history.consume("seldom"),
    ]  # fmt: skip
    with history.reader:
        for _ in range(150):
            history.random.choice(steps)()
        history.commit()
        history.follow()
    for name in ("often", "seldom"):
        history.consume(name, is_killed=False)
    assert all(each.contents == contents(store_dir) for each in history.receivers.values())
    history.store.close()


def make(path: Path, rows: int = ROWS) -> tierstore.Store:
    store = tierstore.open(path, **SMALL)
    store.create_table(tierstore.TableConfig(name="item", num_embeddings=ROWS, embedding_dim=4))
    change(store, range(rows), event_time=5)
    return store


def change(store: tierstore.Store, rows: Iterable[int], **extra: Any) -> None:
    ids = torch.tensor([*rows])
    store["item"].write(ids, torch.randn(len(ids), 4))
    store.commit(extra=extra)


def taken(store: tierstore.Store, name: str = "c", **options: Any) -> list[tuple[int, int, bool, int]]:
    """Since, version, whether full, and rows of the changes there are, which are acknowledged."""
    found = []
    with store.changes(name, **options) as feed:
        for each in feed:
            found.append((each.since, each.version, each.is_full, sum(len(batch.ids) for batch in each.rows())))
            each.ack()
    return found


def test_only_rows_that_changed_come_and_a_gap_or_a_copy_is_a_full_copy(
    store_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "MAX_ANCESTORS", LINEAGE)
    with make(store_dir, 200) as store:
        assert [taken(store), taken(store)] == [[(0, 1, True, 200)], []]
        for row in range(LINEAGE):
            change(store, [row, 250])
        assert store.consumers() == {"c": 1}
        assert taken(store, since=1) == [(1, 5, False, 5)]
        assert taken(store, since=4) == taken(store, since=0) == [(0, 5, True, 201)]
        for _ in range(LINEAGE + 1):
            store.commit()
        assert store.consumers() == {"c": 0}
        assert taken(store) == [(0, 10, True, 201)]
        shutil.copytree(store_dir, tmp_path / "copy")
    with tierstore.open(tmp_path / "copy", mode="r", **SMALL) as copy:
        held = [next(iter(copy.changes(name))) for name in "ab"]  # and not given up: closed with the store
        assert copy.consumers() == {"a": 0, "b": 0, "c": 0}
        assert taken(copy) == [(0, 10, True, 201)]
        copy.forget_consumer("c")
        assert copy.consumers() == {"a": 0, "b": 0}
        with copy.changes("c") as feed:
            pass
        with pytest.raises(errors.ClosedError):
            next(iter(feed))
    with pytest.raises(errors.ClosedError):
        held[0].ack()


def test_a_change_is_good_until_the_next_and_a_name_is_for_one(
    store_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(_: Path) -> None:
        raise Killed

    with tierstore.open(cold="memory") as memory, pytest.raises(errors.TierstoreError, match="in memory, or sharded"):
        memory.changes("c")
    with make(store_dir) as store:
        for name in ("", "a/b", ".hidden", "x" * 101, 3):
            with pytest.raises(ValueError, match="consumer="):
                store.changes(name)  # type: ignore[arg-type]
        for since in ("1", True, 1.0):  # that of the cursor, but for its type
            with pytest.raises(TypeError, match="since must be an int"):
                store.changes("c", since=since)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has no consumer 'c'"):
            store.forget_consumer("c")
        for _ in range(2):
            for each in store.changes("c"):  # and is not closed
                assert each.version == 1
        with tierstore.open(store_dir, mode="r", **SMALL) as other, store.changes("c") as feed:
            first, rows = next(iter(feed)), next(iter(feed)).rows()
            assert (first.event_time, first.tables) == (5.0, (store["item"].config,))
            next(rows)

            def in_fork(_: object) -> None:
                for use in (first.ack, lambda: next(first.rows()), lambda: next(rows), lambda: next(iter(feed))):
                    with pytest.raises(errors.ClosedError, match="is the parent process's"):
                        use()
                feed._held.close()  # as where an interpreter ends

            assert fork(in_fork)[1] == 0
            for action in (other.changes, other.forget_consumer):
                with pytest.raises(errors.TierstoreError, match="are being taken, here or by another process"):
                    action("c")
            change(store, [1])
            assert [each.event_time for each in feed] == [None]  # and none after one that is not acknowledged
            for stale in (first.ack, lambda: next(rows), lambda: next(first.rows())):
                with pytest.raises(errors.ClosedError, match="take them one by one"):
                    stale()
            again = iter(store.changes("c"))
            with monkeypatch.context() as patched, contextlib.suppress(Killed):
                patched.setattr("tierstore.system.files.sync_directory", kill)
                store.forget_consumer("c")
            with pytest.raises(errors.ClosedError):
                next(again)
            assert store.consumers() == {}
            assert taken(store) == [(0, 2, True, ROWS)]
            store.forget_consumer("c")
            assert store.consumers() == {}
        with pytest.raises(errors.ClosedError):
            next(iter(feed))
    tierstore.quantize(store_dir, tmp_path / "small", dtype="int8")
    with tierstore.open(tmp_path / "small", mode="r", **SMALL) as store:
        receiver = Receiver()
        assert all(receiver.take(each) for each in store.changes("c"))
        assert receiver.contents == contents(tmp_path / "small")


def test_ids_of_a_dropped_table_are_deleted_with_the_change_after(store_dir: Path) -> None:
    with make(store_dir) as store:
        shape: dict[str, Any] = {"num_embeddings": 9, "embedding_dim": 4}
        for name in ("user", "user", "tag"):
            store.create_table(tierstore.TableConfig(name=name, ids=tierstore.DynamicIds(), **shape))
            store[name].admit(torch.tensor([7]))
            for row in range(2):
                change(store, [row])
                taken(store)
            assert len([*store_dir.glob("consumers/c/*.ids")]) == 1
            store.drop_table(name)


@pytest.mark.parametrize("damaged", ["cursor.json", "0.ids", "missing", "vector"])
def test_damage_of_what_is_kept_for_a_consumer_is_a_full_copy(
    store_dir: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tierstore.open(store_dir, **SMALL) as store:
        ids = tierstore.DynamicIds()
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4, ids=ids))
        for _ in range(2):
            if store.version and damaged == "vector":
                table.write(torch.tensor([7]), torch.ones(1, 4))
            else:
                table.admit(torch.tensor([7]))
            store.commit()
            if store.version == 1:
                taken(store)
        path = store_dir / "consumers" / "c" / ("0.ids" if damaged in ("missing", "vector") else damaged)
        data = bytearray(path.read_bytes())
        path.unlink()
        if damaged != "missing":
            data[next(at for at, byte in enumerate(data) if byte) + 9] ^= 1
            path.write_bytes(data)
        assert store.consumers() == {"c": 0 if path.suffix == ".json" else 1}
        if damaged == "vector":
            with pytest.raises(errors.DamagedError, match="gets a full copy next") as caught:
                taken(store)
        assert [taken(store), taken(store)] == [[(0, 2, True, 1)], []]
        assert f"{path}" in (f"{caught.value}" if damaged == "vector" else caplog.text)


CONSUMER = """
import os, pickle, sys
from pathlib import Path
import tierstore
from tests.store.test_changes import SMALL, Receiver
from tierstore.system import killpoints
store, sink, point = sys.argv[1:]
receiver = Receiver()
if os.path.exists(sink):
    receiver.tables = pickle.loads(Path(sink).read_bytes())
killpoints.hook = lambda name: os._exit(9) if name == point else None
with tierstore.open(store, mode="r", **SMALL) as reader, reader.changes("far") as feed:
    for line in sys.stdin:
        for change in feed:
            receiver.take(change)
            Path(sink).write_bytes(pickle.dumps(receiver.tables))
            change.ack()
        print(change.version, flush=True)
"""


def test_a_consumer_in_another_process_follows_and_is_killed(store_dir: Path, tmp_path: Path) -> None:
    arguments = str(store_dir), str(sink := tmp_path / "sink")
    with make(store_dir) as store:
        far = Child(CONSUMER, *arguments, "")
        for row in range(3):
            assert int(far.ask("look")) == store.version
            assert pickle.loads(sink.read_bytes()) == contents(store_dir)
            change(store, [row])
        with pytest.raises(errors.TierstoreError, match="by another process"):
            store.changes("far")
        far.kill()
        for point in (*killpoints.FEED_POINTS, ""):
            far = Child(CONSUMER, *arguments, point)
            assert far.ask("look") == ("" if point else f"{store.version}\n")
            far.kill()
            change(store, [7, 8]) if point else None
        assert pickle.loads(sink.read_bytes()) == contents(store_dir)
        assert store.consumers() == {"far": store.version}
