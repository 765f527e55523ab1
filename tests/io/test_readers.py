"""Readers beside a writer: locks on the trees that they show, what following tells and costs, and races."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.cold_tier import WIDE, check_rows, keys_of, words_of, write_rows
from tests.io.support import open_tier
from tierstore.errors import StoreLockedError, TierstoreError
from tierstore.io import reader_locks, row_map
from tierstore.io import writer as io_writer
from tierstore.io.files import open_environment
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.mapped import FileMap
from tierstore.io.reader_locks import FileLocks, OldestReader
from tierstore.io.row_map import RowMap
from tierstore.io.snapshot import Snapshot


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    open_tier(tmp_path).close()
    return tmp_path / "rows.lmdb"


def opened(stack: ExitStack, path: Path) -> FileLocks:
    return stack.enter_context(closing(FileLocks(path)))


def test_the_oldest_of_any_number_of_readers_is_found(stack, rows):
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


def test_a_reader_waits_for_a_writer_that_goes_back_and_not_for_ever(stack, rows, monkeypatch):
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


def test_a_second_writer_learns_who_has_the_lock_from_a_machine_with_dead_mounts(stack, rows, monkeypatch):
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


def test_a_reader_begins_anew_if_its_tree_was_succeeded_before_it_was_locked(stack, rows, monkeypatch):
    environment = stack.enter_context(closing(open_environment(rows, 1 << 30)))
    file_map, asking = stack.enter_context(closing(FileMap(rows, 1 << 30))), opened(stack, rows)
    first = environment.info()["last_txnid"]
    asked, hold = [], file_map.locks.hold

    def overtaken(txn_id: int) -> None:
        for number in range(3 if len(asked) < 2 else 0):
            with environment.begin(write=True) as txn:
                txn.put(number.to_bytes(16, "big"), bytes(20_000))
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


def test_readers_of_another_shape_are_refused(stack, rows, monkeypatch):
    environment = stack.enter_context(closing(open_environment(rows, 1 << 30)))
    monkeypatch.setattr(reader_locks, "_READER_BYTES", 4096)
    with pytest.raises(TierstoreError, match=r"install the release of lmdb"):
        OldestReader(environment, rows, opened(stack, rows))
    assert "0" not in [line.split()[-1] for line in environment.readers().splitlines()]


NUM_ROWS = 430
FIRST = keys_of(0, [0])


def _opened(path: Path, tables: tuple[int, ...] = (0,), **changes: Any) -> LmdbColdTier:
    tier = open_tier(path, **{"slack": 1.05} | changes)
    tier.set_tables(dict.fromkeys(tables, (WIDE, NUM_ROWS)))
    return tier


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LmdbColdTier]:
    with closing(_opened(tmp_path)) as tier:
        yield tier


@pytest.fixture
def follower(writer: LmdbColdTier, tmp_path: Path) -> Iterator[LmdbColdTier]:
    """At version 2, whose row 0 is of generation 2; all others are of generation 1."""
    write_rows(writer, WIDE, keys_of(0, np.arange(210)), 1)
    writer.commit(b"", 1)
    write_rows(writer, WIDE, FIRST, 2)
    writer.commit(b"", 2, keep=2)
    with closing(_opened(tmp_path, readonly=True)) as tier:
        check_rows(tier, WIDE, FIRST, 2)
        yield tier


@pytest.mark.parametrize("moment", ["rollback: transaction committed", "rollback: durable"])
def test_a_rollback_that_has_not_deleted_its_segments(writer, follower, moment, monkeypatch):
    def look(reached: str) -> None:
        if reached != moment:
            return
        found = follower.find_newer()
        assert found.version == 1
        assert FIRST in found.changed
        found.show()
        check_rows(follower, WIDE, FIRST, 1)

    monkeypatch.setattr(io_writer, "reach", look)
    writer.rollback(1)
    assert follower.version == 1
    assert follower.find_newer() is None
    check_rows(follower, WIDE, FIRST, 1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[RowMap]:
    """Maps of rows that were copied: what following costs a reader of a large store."""
    made, copied = list[RowMap](), RowMap.copied
    monkeypatch.setattr(RowMap, "copied", lambda rows: made.append(rows) or copied(rows))
    return made


def test_following_copies_no_map_and_reads_new_indexes_only(writer, follower, copies, monkeypatch):
    num_read, read = [], row_map.read_indexes
    monkeypatch.setattr(row_map, "read_indexes", lambda *both: num_read.append(len(both[1])) or read(*both))
    for poll in range(40):
        write_rows(writer, WIDE, keys_of(0, np.arange(poll, poll + 30)), 3, epoch=3)
        num_read.clear()
        before = follower._file.snapshot.txn_id
        assert follower.find_newer() is None
        assert follower._file.snapshot.txn_id > before, "pages of what is not committed are not kept"
        assert sum(num_read) <= 2, "one segment is new, and one of moved rows"
        check_rows(follower, WIDE, keys_of(0, np.arange(1, 210)), 1)
    writer.commit(b"", 3, keep=3)  # rows of before and after version 2 are not put together
    found = follower.find_newer()
    assert found.changed.tolist() == keys_of(0, np.arange(69)).tolist()
    found.show()
    check_rows(follower, WIDE, keys_of(0, np.arange(69)), 3)
    assert not copies


def test_rows_that_are_moved_are_entered_while_others_read(tmp_path, copies):
    others, keys = np.flatnonzero(np.arange(NUM_ROWS) % 3), keys_of(0, np.arange(0, NUM_ROWS, 3))
    with closing(_opened(tmp_path, slack=100.0)) as tier:
        for first in range(0, NUM_ROWS, 10):
            write_rows(tier, WIDE, keys_of(0, np.arange(first, first + 10)), 1)
        tier.commit(b"", 1)
        write_rows(tier, WIDE, keys_of(0, others), 2)
        tier.commit(b"", 2)
    with closing(_opened(tmp_path, readonly=True)) as follower, closing(_opened(tmp_path, slack=1.001)) as tier:
        for _ in range(2):
            with follower.lease() as (snapshot, rows):
                for turn in range(30):
                    write_rows(tier, WIDE, keys_of(0, others[turn : turn + 3]), 3)
                    tier._writer.delete_dead()
                    assert follower.find_newer() is None
                    found = follower.reader.stored(snapshot, rows, keys)
                    words = np.concatenate([found.weights, found.state], axis=1)
                    np.testing.assert_array_equal(words, words_of(keys, 1, words.shape[1]))
        assert tier.counters().rows_moved >= len(keys)
        check_rows(follower, WIDE, keys_of(0, others), 2)
    assert not copies
