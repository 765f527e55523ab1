"""A read-only tier beside a writer in the same process: what it is told, what it costs, and races."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.cold_tier import WIDE, check_rows, keys_of, words_of, write_rows
from tests.io.support import open_tier
from tierstore.io import row_map
from tierstore.io import writer as io_writer
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.reads import RowReader
from tierstore.io.row_file import OpenFile
from tierstore.io.row_map import RowMap
from tierstore.io.snapshot import Snapshot

NUM_ROWS = 430
FIRST = keys_of(0, [0])


def _opened(path: Path, tables: tuple[int, ...] = (0,), **changes: Any) -> LmdbColdTier:
    tier = open_tier(path, **{"slack": 1.05} | changes)
    for table in tables:
        tier.add_table(table, WIDE, NUM_ROWS)
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
def test_a_rollback_that_has_not_deleted_its_segments(
    writer: LmdbColdTier, follower: LmdbColdTier, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(reached: str) -> None:
        if reached != moment:
            return
        found = follower.find_newer()
        assert found is not None
        assert found.version == 1
        assert FIRST in found.changed
        found.show()
        check_rows(follower, WIDE, FIRST, 1)

    monkeypatch.setattr(io_writer, "reach", look)
    writer.rollback(1)
    assert follower.version == 1
    assert follower.find_newer() is None
    check_rows(follower, WIDE, FIRST, 1)


def test_following_copies_no_map_and_reads_new_indexes_only(
    writer: LmdbColdTier, follower: LmdbColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, num_read = [], []
    copied, read = RowMap.copied, row_map.read_indexes
    monkeypatch.setattr(RowMap, "copied", lambda rows: copies.append(1) or copied(rows))
    monkeypatch.setattr(row_map, "read_indexes", lambda *both: num_read.append(len(both[1])) or read(*both))
    for poll in range(40):
        write_rows(writer, WIDE, keys_of(0, np.arange(poll, poll + 30)), 3, epoch=3)
        num_read.clear()
        assert follower.find_newer() is None
        assert sum(num_read) <= 2, "one segment is new, and one of moved rows"
        check_rows(follower, WIDE, keys_of(0, np.arange(1, 210)), 1)
        check_rows(follower, WIDE, FIRST, 2)
    assert not copies
    writer.commit(b"", 3, keep=3)  # rows of before and after version 2 are not put together
    found = follower.find_newer()
    assert found is not None
    assert found.changed.tolist() == keys_of(0, np.arange(69)).tolist()
    found.show()
    check_rows(follower, WIDE, keys_of(0, np.arange(69)), 3)
    check_rows(follower, WIDE, keys_of(0, np.arange(69, 210)), 1)
    assert not copies


@pytest.mark.parametrize("reads_rows", [True, False])
def test_a_map_is_copied_once_for_who_reads_through_it_and_not_for_a_backup(
    writer: LmdbColdTier, follower: LmdbColdTier, reads_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copied = [], RowMap.copied
    monkeypatch.setattr(RowMap, "copied", lambda rows: copies.append(1) or copied(rows))
    with follower.lease() if reads_rows else follower.lease_tree() as leased:
        for version in range(3, 7):
            write_rows(writer, WIDE, FIRST, version)
            writer.commit(b"", version)
            found = follower.find_newer()
            assert found is not None
            found.show()
            check_rows(follower, WIDE, FIRST, version)
        if reads_rows:
            assert (
                follower.reader.stored(*leased, FIRST).weights.tolist()
                == words_of(FIRST, 2, WIDE.weight_words).tolist()
            )
    assert len(copies) == reads_rows


def test_rows_that_are_moved_are_entered_while_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copied = [], RowMap.copied
    monkeypatch.setattr(RowMap, "copied", lambda rows: copies.append(1) or copied(rows))
    others = np.flatnonzero(np.arange(NUM_ROWS) % 3)
    keys = keys_of(0, np.arange(0, NUM_ROWS, 3))

    def check_leased(reader: RowReader, snapshot: Snapshot, rows: RowMap) -> None:
        found = reader.stored(snapshot, rows, keys)
        words = np.concatenate([found.weights, found.state], axis=1)
        np.testing.assert_array_equal(words, words_of(keys, 1, words.shape[1]))

    with closing(_opened(tmp_path, slack=100.0)) as tier:
        for first in range(0, NUM_ROWS, 10):
            write_rows(tier, WIDE, keys_of(0, np.arange(first, first + 10)), 1)
        tier.commit(b"", 1)
        write_rows(tier, WIDE, keys_of(0, others), 2)
        tier.commit(b"", 2)
    with closing(_opened(tmp_path, readonly=True)) as follower, closing(_opened(tmp_path, slack=1.001)) as tier:
        reader = follower.reader
        segments = follower._file.make_map().segments[WIDE]
        for _ in range(2):
            with follower.lease() as (snapshot, rows):
                for turn in range(30):
                    write_rows(tier, WIDE, keys_of(0, others[turn : turn + 3]), 3)
                    tier._writer.delete_dead()
                    assert follower.find_newer() is None
                    check_leased(reader, snapshot, rows)
        assert tier.counters().rows_moved >= len(keys)
        assert follower._file.rows is rows
        assert not copies
        check_rows(follower, WIDE, keys_of(0, others), 2)
        assert follower.find_newer() is None
        assert len(segments.in_use) < 43


def test_a_map_that_is_dropped_before_it_is_leased(follower: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = OpenFile.make_map, []

    def make_and_drop(file: OpenFile) -> RowMap:
        made.append(make(file))
        if len(made) == 1:
            file.rows = None
        return made[-1]

    follower.set_tables({0: (WIDE, NUM_ROWS)})
    monkeypatch.setattr(OpenFile, "make_map", make_and_drop)
    check_rows(follower, WIDE, FIRST, 2)
    assert len(made) == 2


@pytest.mark.parametrize("readonly", [False, True])
def test_rows_of_tables_that_were_not_added(tmp_path: Path, readonly: bool) -> None:
    """The rows of table 0 lie in a segment that begins with one of table 1."""
    keys = np.concatenate([keys_of(1, [0]), FIRST])
    with closing(_opened(tmp_path, (0, 1))) as tier:
        write_rows(tier, WIDE, keys, 1)
        tier.commit(b"", 1)
    with closing(_opened(tmp_path, readonly=readonly)) as tier:
        with pytest.raises(ValueError, match="rows of tables that were not added"):
            check_rows(tier, WIDE, FIRST, 1)
        tier.add_table(1, WIDE, NUM_ROWS)
        check_rows(tier, WIDE, keys, 1)
    with closing(_opened(tmp_path)) as tier, pytest.raises(ValueError, match="rows of tables that were not added"):
        write_rows(tier, WIDE, FIRST, 2)
