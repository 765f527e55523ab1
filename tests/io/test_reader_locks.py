"""Locks on trees, and what LMDB's writer is told of them."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.io.support import open_tier
from tierstore.errors import StoreLockedError, TierstoreError
from tierstore.io import reader_locks
from tierstore.io.files import open_environment
from tierstore.io.mapped import FileMap
from tierstore.io.reader_locks import FileLocks, OldestReader
from tierstore.io.snapshot import Snapshot


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    open_tier(tmp_path).close()
    return tmp_path / "rows.lmdb"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, path: Path) -> FileLocks:
    return stack.enter_context(closing(FileLocks(path)))


def test_the_oldest_of_any_number_of_readers_is_found(stack: ExitStack, rows: Path) -> None:
    asking, readers = opened(stack, rows), [opened(stack, rows) for _ in range(5)]
    generator = np.random.default_rng(1)
    held: list[tuple[FileLocks, int]] = []
    for _ in range(300):
        if len(held) > 12 or (held and generator.random() < 0.4):
            reader, txn_id = held.pop(int(generator.integers(len(held))))
            reader.release(txn_id)
        else:
            reader, txn_id = readers[generator.integers(5)], int(generator.integers(20))  # neighbours become one lock
            reader.hold(txn_id)
            held.append((reader, txn_id))
        for below in (0, 1, 7, 20, 1 << 40):
            assert asking.oldest(below) == min((txn_id for _, txn_id in held if txn_id < below), default=None)
            for reader in readers:
                assert reader.oldest(below) == asking.oldest(below)


def test_a_reader_waits_for_a_writer_that_goes_back_and_not_for_ever(
    stack: ExitStack, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, other = opened(stack, rows), opened(stack, rows)
    writer = stack.enter_context(closing(FileLocks(rows, writable=True)))
    writer.lock_for_writer()
    monkeypatch.setattr(reader_locks, "_PATIENCE_SECONDS", 0.0)
    with writer.readers_kept_out() as is_alone:
        assert is_alone
        with pytest.raises(StoreLockedError, match="putting it back to its last commit"):
            reader.hold(7)
    reader.hold(7)
    with writer.readers_kept_out() as is_alone:
        assert not is_alone
    assert other.oldest(8) == 7


def test_a_second_writer_learns_who_has_the_lock_from_a_machine_with_dead_mounts(
    stack: ExitStack, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (stack.enter_context(closing(FileLocks(rows, writable=True))) for _ in range(2))
    for name in ("stat", "lstat", "statvfs", "open"):

        def look(plain: Any, path: Any, *options: Any, **more: Any) -> Any:
            assert "/fd/" not in str(path), "files of other processes are looked at, whose file systems may be dead"
            return plain(path, *options, **more)

        monkeypatch.setattr(os, name, partial(look, getattr(os, name)))
    first.lock_for_writer()
    expected = rf"rows\.lmdb: this process \({os.getpid()}\) has the store open for writing; close it there"
    with pytest.raises(StoreLockedError, match=rf'{expected}, or open with mode="r"\.$'):
        second.lock_for_writer()
    with pytest.raises(StoreLockedError, match=rf"{expected}\.$"):
        second.lock_for_writer(shared=True)


def test_a_writer_lock_that_the_file_system_has_not_leaves_nothing_open(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(reader_locks, "lock_range", refused)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TierstoreError, match=r"rows\.lmdb: its file system, .* lacks what is needed there: no locks"):
        open_tier(rows.parent)
    assert os.listdir("/proc/self/fd") == before


def put(environment: "lmdb.Environment", lowest: OldestReader, number: int) -> None:
    lowest.update()
    with environment.begin(write=True) as txn:
        txn.put(number.to_bytes(16, "big"), bytes(20_000))
        txn.delete((number - 1).to_bytes(16, "big"))


def test_lmdb_reuses_no_page_of_the_oldest_tree_that_is_locked(stack: ExitStack, rows: Path) -> None:
    environment = stack.enter_context(closing(open_environment(rows, 1 << 30)))
    asking, reader = opened(stack, rows), opened(stack, rows)
    lowest = stack.enter_context(closing(OldestReader(environment, rows, asking)))

    def grown(times: int) -> int:
        before = environment.info()["last_pgno"]
        for _ in range(times):
            put(environment, lowest, environment.info()["last_txnid"])
        return int(environment.info()["last_pgno"]) - before

    grown(5)
    assert grown(20) == 0
    reader.hold(environment.info()["last_txnid"])
    assert grown(20) >= 15 * 5
    reader.release(environment.info()["last_txnid"] - 20)
    grown(5)
    assert grown(20) == 0


def test_a_reader_begins_anew_if_its_tree_was_succeeded_before_it_was_locked(
    stack: ExitStack, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = stack.enter_context(closing(open_environment(rows, 1 << 30)))
    file_map, asking = stack.enter_context(closing(FileMap(rows, 1 << 30))), opened(stack, rows)
    lowest = stack.enter_context(closing(OldestReader(environment, rows, asking)))
    first = environment.info()["last_txnid"]
    asked, hold = [], file_map.locks.hold

    def overtaken(txn_id: int) -> None:
        for _ in range(3 if len(asked) < 2 else 0):
            put(environment, lowest, 1)
        asked.append(txn_id)
        hold(txn_id)

    monkeypatch.setattr(file_map.locks, "hold", overtaken)
    snapshot = Snapshot(rows, file_map, 4096)
    assert asked == [first, first + 3, first + 6]
    assert asking.oldest(1 << 40) == snapshot.txn_id == first + 6
    again = Snapshot(rows, file_map, 4096)
    snapshot.close()
    assert asking.oldest(1 << 40) == first + 6
    again.close()
    assert asking.oldest(1 << 40) is None


def test_a_table_of_readers_of_another_shape_is_refused(
    stack: ExitStack, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = stack.enter_context(closing(open_environment(rows, 1 << 30)))
    monkeypatch.setattr(reader_locks, "_READER_BYTES", 4096)
    with pytest.raises(TierstoreError, match=r"install the release of lmdb"):
        OldestReader(environment, rows, opened(stack, rows))
    assert "0" not in [line.split()[-1] for line in environment.readers().splitlines()]
