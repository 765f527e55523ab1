"""An update that fails, is killed or gone back from leaves no rows and no tables; none of another store is taken."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tierstore
from tests.children import run
from tests.following import WRITER, Child
from tests.updates.support import SMALL, change, contents, same, table_config, version_of
from tierstore import errors
from tierstore.io.lmdb import LmdbColdTier
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.trace import read_trace
from tierstore.updates import Update, apply_update, write_update


class Forked(NamedTuple):
    """A store that was put back from a copy of its version 1: two histories, each with a new table in version 2."""

    source: Path  # the other one
    first: Update  # to version 1
    one: Update  # from there to one version 2
    other: Update  # and to the other


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    folder = tmp_path_factory.mktemp("forked")
    change(folder / "one", 1, keep=2)
    first = write_update(folder / "one", folder / "first")
    shutil.copytree(folder / "one", folder / "other")
    made = []
    for name, width in (("one", 3), ("other", 9)):
        with tierstore.open(folder / name, keep=2, **SMALL) as store:
            table = store.create_table(table_config(f"new {name}", embedding_dim=width))
            table.write(torch.arange(5), torch.ones(5, width))
            store["item"].write(torch.tensor([1]), torch.full((1, 6), float(width)))
            store.commit()
        made.append(write_update(folder / name, folder / f"update {name}", since=1))
    return Forked(folder / "other", first, *made)


@pytest.fixture(scope="module")
def first(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    apply_update(directory := tmp_path_factory.mktemp("first") / "replica", forked.first.path)
    return directory


@pytest.fixture
def replica(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "replica"))


def tables_of(directory: Path) -> list[str]:
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return list(store.tables)


def test_a_rollback_by_any_other_way_makes_room_too(replica, forked, tmp_path):
    apply_update(replica, forked.one.path)
    with tierstore.open(replica, keep=2, **SMALL) as store:
        store.rollback(1)
        assert list(store.tables) == ["item", "user", "new one"]
    assert tables_of(replica) == ["item", "user"]
    assert list(write_update(replica, tmp_path / "update of a replica").header.rows_of_tables()) == ["item", "user"]
    apply_update(replica, forked.other.path)
    assert same(contents(replica), contents(forked.source))


def test_an_update_that_fails_leaves_no_tables(replica, forked, tmp_path, monkeypatch):
    """A replica to which nothing was applied yet is nobody's: the next update may be of another store."""
    change(tmp_path / "another", 1, names=("user",))
    another, before = write_update(tmp_path / "another", tmp_path / "update"), contents(replica)

    def fail(*_: Any, **__: Any) -> None:
        raise errors.DiskFullError("no room left")

    with monkeypatch.context() as broken:
        broken.setattr(LmdbColdTier, "commit", fail)
        for directory, update in ((replica, forked.one), (tmp_path / "new", another)):
            with pytest.raises(errors.DiskFullError):
                apply_update(directory, update.path)
    assert tables_of(replica) == ["item", "user"]
    assert same(contents(replica), before)
    apply_update(replica, forked.other.path)
    assert same(contents(replica), contents(forked.source))
    apply_update(tmp_path / "new", forked.first.path)
    assert same(contents(tmp_path / "new"), before)


KILLED = """
    import shutil
    from tierstore.system import killpoints
    from tierstore.updates import apply_update, roll_back_replica

    first, one, other, replica = map(Path, sys.argv[1:5])

    def shown():
        try:
            with tierstore.open(replica, mode="r", ddr="4MiB", threads=1) as store:
                rows = [table.read(torch.arange(900)).view(torch.uint8).numpy() for table in store.tables.values()]
                bits = hash(b"".join(each.tobytes() for each in rows))
                return f"{store.extra['tierstore.update']['version']} {list(store.tables)} {bits}"
        except (errors.StoreNotFoundError, KeyError):  # or begun, and without a version
            return "none"

    def act(action, stop):
        reached = []
        def hook(name):
            if name not in reached:
                reached.append(name)
                if len(reached) == stop:
                    print(name, end=": ", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
        killpoints.hook = hook
        if action == "rollback":
            roll_back_replica(replica)
        else:
            apply_update(replica, first if action == "create" else one)

    def begin(updates):
        shutil.rmtree(replica, ignore_errors=True)
        for update in updates:
            apply_update(replica, update)
        return shown()

    both = [first, one]
    for action, before, after in ("create", [], [first]), ("apply", [first], both), ("rollback", both, [first]):
        print("begin", " | ".join(map(begin, (after, [first, other], before))))
        for stop in range(1, 300):
            begin(before)
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                act(action, stop)
                os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
                break
            print(shown(), end=" | ")
            if action == "create":
                apply_update(replica, first)
            tierstore.open(replica, keep=2, ddr="4MiB", threads=1).close()  # what was not durable is gone then
            print(settled := shown(), end=" | ")
            if settled.startswith("2"):
                roll_back_replica(replica)
            apply_update(replica, other)
            print(shown())
    """


@pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")
def test_a_kill_at_any_step_leaves_either_version_and_a_place_for_other_tables(forked, tmp_path):
    files = (forked.first.path, forked.one.path, forked.other.path)
    _, *actions = run(KILLED, *files, tmp_path / "killed").split("begin ")
    assert len(actions) == 3
    for known, *lines in map(str.splitlines, actions):
        after, other, before = known.split(" | ")
        assert len(lines) > 4
        seen = set()
        for line in lines:
            at_once, settled, last = line.rpartition(": ")[2].split(" | ")
            assert {at_once, settled} <= {before, after}, line
            assert last == other, line
            seen.add(at_once)
        assert seen == {before, after}


def test_another_store_or_table_is_refused_even_if_it_would_fit(replica, forked, tmp_path):
    before = contents(replica)
    change(tmp_path / "twin", 1)
    twin = write_update(tmp_path / "twin", tmp_path / "update of a twin")
    with pytest.raises(errors.TierstoreError, match="new, empty directory") as refused:
        apply_update(replica, twin.path)
    for source in (forked.first.header.origin.source, twin.header.origin.source):
        assert source in str(refused.value)
    assert same(contents(replica), before)
    whole = write_update(forked.source, tmp_path / "whole")
    apply_update(replica, forked.one.path)
    with pytest.raises(errors.TableError, match=r"table 2 of .*new one.*new other.*new, empty directory"):
        apply_update(replica, whole.path, replaces=forked.one.header.origin.commit_id)
    assert version_of(replica) == 2


class Writer(Child):
    replica: Path

    def apply(self, update: Update) -> None:
        assert "error" not in self.ask(json.dumps(["apply", "", str(self.replica), str(update.path)]))

    def go_back(self) -> None:
        assert "error" not in self.ask(json.dumps(["rollback", "", str(self.replica)]))


@pytest.fixture(scope="module")
def writer_process() -> Iterator[Writer]:
    yield (made := Writer(WRITER))
    made.end()


@pytest.fixture
def writer(replica: Path, writer_process: Writer) -> Writer:
    writer_process.replica = replica
    return writer_process


@pytest.fixture
def reader(replica: Path) -> Iterator[tierstore.Store]:
    with tierstore.open(replica, mode="r", **SMALL) as store:
        store["item"].read(torch.arange(9))
        yield store


def test_a_recording_ends_where_another_table_takes_a_place(reader, writer, forked, tmp_path):
    with reader.record(tmp_path / "lookups.npz", rate=1):
        for update, name in ((forked.one, "new one"), (forked.other, "new other")):
            writer.apply(update)
            reader.refresh()
            reader[name].read(torch.arange(3))
            writer.go_back()
            reader.refresh()
    looked_up = {name: len(table.ids) for name, table in read_trace(tmp_path / "lookups.npz").tables.items()}
    assert looked_up == {"item": 0, "user": 0, "new one": 3}


def test_a_reader_that_missed_the_rollback_says_so(reader, writer, forked):
    writer.apply(forked.one)
    reader.refresh()
    writer.go_back()
    writer.apply(forked.other)
    with pytest.raises((errors.StoreReplacedError, errors.DamagedError)):
        reader.refresh()
    assert reader["new one"].read(torch.tensor([0])).tolist() == [[1.0] * 3]


def test_a_table_that_went_with_a_version_reads_nothing_of_another(reader, writer, forked):
    writer.apply(forked.one)
    assert reader.find_newer() is not None, "what is seen and not shown is in nobody's way"
    reader.refresh()
    gone, ids, offsets = reader["new one"], torch.tensor([0]), torch.tensor([0, 1])
    gone.pooled(ids, offsets)
    for version in (writer.go_back, lambda: writer.apply(forked.other)):
        version()
        reader.refresh()
        for use in (lambda: gone.read(ids), lambda: gone.pooled(ids, offsets)):
            with pytest.raises(errors.TableError, match="not in the version that the store shows"):
                use()
    assert list(reader.tables) == ["item", "user", "new other"]
    assert reader["new other"].read(ids).tolist() == [[1.0] * 9]
