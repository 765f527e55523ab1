"""What only the tier on a file promises: reopening, recovery, locks, a full disk, bounded memory."""

import contextlib
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.conformance.cold_tier import WIDE, check_rows, commit, keys_of, read_rows, write_rows
from tests.io.support import flip, opened, place_of, plain_lmdb
from tierstore.errors import ChecksumError, DamagedError, DiskFullError
from tierstore.io.segments import STORED, stored_segments


def _segments(rows: int) -> int:
    """That so many rows of ``WIDE`` take when they are written in one call."""
    return -(-rows // WIDE.rows_per_segment)


def test_a_commit_that_finds_no_room_to_clean_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        keys = keys_of(0, np.arange(500))
        for version in (1, 2):
            write_rows(tier, WIDE, keys, version)
            with monkeypatch.context() as patch:
                patch.setattr(tier._writer, "_clean", Mock(side_effect=DiskFullError("no room left")))
                assert commit(tier, b"") == version
        assert "no room to clean up" in caplog.text
        with tier.lease() as (snapshot, _):
            assert len(stored_segments(snapshot)) == _segments(500), "what is dead goes before cleaning begins"
        check_rows(tier, WIDE, keys, 2)


def test_a_segment_that_its_tree_has_lost_is_an_error_that_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys := keys_of(0, np.arange(50)), 1)
        assert commit(tier, b"") == 1
        assert tier._writer is not None
        writer, before = tier._writer, tier._writer._record
        lost = np.zeros(1, STORED)
        lost["number"] = 7
        with pytest.raises(DamagedError, match="has lost segment 7"), writer._changing([]) as txn:
            writer._delete(txn, lost)
        write_rows(tier, WIDE, keys, 2)
        assert commit(tier, b"") == 2
        assert writer._record.num_segments == before.num_segments
    with contextlib.closing(opened(tmp_path, readonly=True)) as tier:
        check_rows(tier, WIDE, keys, 2)


def test_a_commit_ends_though_others_write_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(500)), 1)
        calls: list[None] = []
        monkeypatch.setattr(tier._writer, "_clean", lambda: not calls.append(None))
        assert commit(tier, b"") == 1
        assert len(calls) < 30


def test_close_waits_for_reads(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    keys = keys_of(0, np.arange(1000))
    write_rows(tier, WIDE, keys, 1)
    with tier.lease():
        closing = threading.Thread(target=tier.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join()
    with plain_lmdb(tmp_path) as txn:
        assert txn.stat()["entries"] == _segments(1000) + 3, "the records of the store, its head, and the log"


def test_numbers_of_segments_are_never_given_again(tmp_path: Path) -> None:
    """Not after a rollback, nor by a process that goes back to a tree that lacks some: a stale page could pass."""
    seen: set[int] = set()
    for generation in range(6):  # each drops those that the one before left behind
        with contextlib.closing(opened(tmp_path)) as tier:
            write_rows(tier, WIDE, keys_of(0, np.arange(500)), generation)
            with tier.lease_tree() as snapshot:
                numbers = set(stored_segments(snapshot)["number"].tolist())
            assert numbers.isdisjoint(seen)
            seen |= numbers


@pytest.mark.parametrize("part", ["a row", "its index"])
def test_a_damaged_segment_is_not_cleaned(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows stay where they are, and are an error for whoever reads them, not for whoever writes others."""
    tier = opened(tmp_path, slack=1.01)
    write_rows(tier, WIDE, keys_of(0, np.arange(200)), 1)
    commit(tier, b"")
    place = place_of(tier, 0, 1)
    flip(tmp_path, place.row if part == "a row" else place.segment_page * 4096 + 16 + 8 * 50)
    for generation in range(2, 9):
        write_rows(tier, WIDE, keys_of(0, np.arange(0, 200, 2)), generation)
        commit(tier, b"")
    assert "is damaged, and stays as it is" in caplog.text
    check_rows(tier, WIDE, keys_of(0, np.arange(0, 200, 2)), 8)
    check_rows(tier, WIDE, keys_of(0, np.arange(3, 200, 2)), 1)
    if part == "a row":
        with pytest.raises(ChecksumError, match="row 1 of table 0"):
            read_rows(tier, WIDE, keys_of(0, [1]))
    tier.close()
