"""What is on disk is not what was written: each kind of damage has its clear error, and nothing crashes.

LMDB's own code trusts its file, so whatever could crash runs in the test's process only behind our checks.
"""

import contextlib
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import NARROW, WIDE, check_rows, commit, keys_of, read_rows, write_rows
from tests.io.support import RowPlace, flip, open_tier, opened, place_of, plain_lmdb, refuse
from tierstore.errors import ChecksumError, DamagedError, FormatError, UnreadableError
from tierstore.io.files import newest_meta
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.records import item_key, segment_key, version_item
from tierstore.io.row_map import RowMap
from tierstore.io.segments import read_indexes, stored_segments
from tierstore.kernels.jit import JIT_ENABLED

PAGE = 4096
ALL = np.arange(1000)
ROWS = WIDE.rows_per_block
SEGMENT_ROWS = WIDE.rows_per_segment


def reading(path: Path) -> contextlib.closing[LmdbColdTier]:
    return contextlib.closing(opened(path, readonly=True))


def writing(path: Path) -> contextlib.closing[LmdbColdTier]:
    return contextlib.closing(opened(path))


def place(path: Path, row: int, table: int = 0) -> RowPlace:
    with reading(path) as tier:
        return place_of(tier, table, row)


def put(path: Path, offset: int, content: bytes) -> None:
    with (path / "rows.lmdb").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_an_index_that_is_damaged_while_the_store_is_open(written: Path) -> None:
    """Rows are read, as they say themselves which they are; verify finds it, and no damaged epoch is made use of."""
    with writing(written) as tier:
        write_rows(tier, WIDE, keys_of(0, [999]), 1)
        found = place_of(tier, 0, 300)
        flip(written, found.segment_page * PAGE + 16 + 8 * 4)  # the newest epoch
        check_rows(tier, WIDE, keys_of(0, ALL), 1)
        expected = rf"segment {found.number} is damaged \(BAD_INDEX\)"
        with pytest.raises(ChecksumError, match=expected):
            tier.verify()
        with tier.lease() as (snapshot, rows), pytest.raises(ChecksumError, match=expected):
            rows.written_since(snapshot, 0)


@pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")
def test_an_index_of_several_pages_that_cannot_be_read(written: Path) -> None:
    """Of each of its pages it is asked whether it could be read: zeros would be keys of other rows."""
    with reading(written) as tier:
        found = place_of(tier, 1, 0)
        assert found.block_page > found.segment_page + 2
        with tier.lease() as (snapshot, rows):
            indexes, guard = read_indexes(snapshot, stored_segments(snapshot)), snapshot.file_map.rows.guard
            uses = (
                lambda: RowMap(rows.shapes).enter(snapshot, indexes, 1, ()),
                lambda: rows.live_rows(snapshot, NARROW, rows.segments[NARROW].in_use),
                tier.verify,
            )
            for page in range(found.segment_page, found.block_page):
                for use in uses:
                    guard.begin()  # it is asked about what was refused before
                    refuse(guard, page)
                    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*device refuses.*log says why.*copy"):
                        use()
        tier.verify()


def test_a_page_header_damaged_between_write_and_commit(written: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB frees as many pages as a page header says: that is looked at before. Others are deleted, rows written."""
    found = place(written, 0)
    header = found.segment_page * PAGE + 12  # number of pages
    with writing(written) as tier:
        write_rows(tier, WIDE, keys_of(0, ALL), 2)
        flip(written, header, bits=2)
        expected = rf"segment {found.number} is damaged \(BAD_PAGE_HEADER\)"
        assert commit(tier, b"") == 2  # what could not be deleted is what the version replaced
        assert re.search(expected, caplog.text)
        write_rows(tier, WIDE, keys_of(0, ALL), 3)
        assert commit(tier, b"") == 3
        with pytest.raises(ChecksumError, match=expected):
            tier.verify()
        flip(written, header, bits=2)
        tier.verify()
    with writing(written) as tier:
        assert commit(tier, b"") == 4
    with plain_lmdb(written) as txn:
        assert txn.get(segment_key(found.number)) is None


def test_nonzero_padding(written: Path) -> None:
    last = place(written, 999)
    assert last.index % ROWS < ROWS - 1, "a place is free in the last block"
    with reading(written) as tier:
        places = [last.pair + 16, last.row + WIDE.row_bytes, last.row + 2 * WIDE.row_bytes - 1]
        places += [(last.block_page + 1) * PAGE - 4, (last.segment_page + 1) * PAGE - 1]
        for at in (*places, last.segment_page * PAGE + 16 + 8 * (6 + last.index + 1)):
            flip(written, at)
            check_rows(tier, WIDE, keys_of(0, ALL), 1)
            with pytest.raises(ChecksumError, match=rf"segment {last.number} is damaged \(BAD_PADDING\)"):
                tier.verify()
            flip(written, at)
        tier.verify()


DAMAGES = ["row", "pair", "zeroed page", "exchanged pages", "another row", "another row and pair", "another key"]


@pytest.mark.parametrize("seed", range(5 * len(DAMAGES)))
def test_damaged_rows_are_errors_and_the_others_are_right(written: Path, seed: int) -> None:
    damage, draw = DAMAGES[seed % len(DAMAGES)], random.Random(seed)
    row = draw.randrange(1000 - SEGMENT_ROWS - 1)
    other = row + draw.choice([1, ROWS, SEGMENT_ROWS])
    source, target = place(written, row), place(written, other)
    data, bad = (written / "rows.lmdb").read_bytes(), [other]
    pages = [each.block_page * PAGE for each in (source, target)]
    if damage == "row":
        flip(written, target.row + draw.randrange(WIDE.row_bytes), bits=1 << draw.randrange(8))
    elif damage == "pair":
        flip(written, target.pair + draw.randrange(16), bits=1 << draw.randrange(8))
    elif damage == "zeroed page":
        put(written, pages[1], bytes(PAGE))
    elif damage == "exchanged pages":
        for at, start in zip(pages, reversed(pages), strict=True):
            put(written, at, data[start : start + PAGE])
    else:
        if damage != "another key":
            put(written, target.row, data[source.row : source.row + WIDE.row_bytes])
        if damage != "another row":
            put(written, target.pair, data[source.pair : source.pair + (8 if damage == "another key" else 16)])
    if "page" in damage:
        block_of = ALL // SEGMENT_ROWS * SEGMENT_ROWS + ALL % SEGMENT_ROWS // ROWS
        blocks = {int(block_of[each]) for each in ([other] if damage == "zeroed page" else [row, other])}
        bad = ALL[np.isin(block_of, list(blocks))].tolist() if damage == "zeroed page" or len(blocks) > 1 else []
    with reading(written) as tier:
        for each in bad:
            with pytest.raises(ChecksumError, match=rf"rows\.lmdb: row {each} of table 0 .*copy"):
                read_rows(tier, WIDE, keys_of(0, [each]))
        check_rows(tier, WIDE, keys_of(0, np.setdiff1d(ALL, bad)), 1)
        if bad:
            with pytest.raises(ChecksumError, match=rf"rows\.lmdb: .*row {min(bad)} of table 0 in segment .*copy"):
                tier.verify()


def test_an_older_page_of_the_same_place(tmp_path: Path) -> None:
    """As a device shows that lost a write: the page that lay there before, of the same rows and whole."""
    before: dict[int, bytes] = {}
    with writing(tmp_path) as tier:
        for version in range(1, 40):
            write_rows(tier, WIDE, keys_of(0, ALL), version)
            commit(tier, b"")
            data = tier.path.read_bytes()
            places = [place_of(tier, 0, row).block_page * PAGE for row in range(0, 1000, ROWS)]
            if lost := [(row, at) for row, at in zip(range(0, 1000, ROWS), places, strict=True) if at in before]:
                break
            before = {at: data[at : at + PAGE] for at in places} | before
    row, at = lost[0]
    assert before[at] != data[at : at + PAGE]
    put(tmp_path, at, before[at])
    with reading(tmp_path) as tier:
        with pytest.raises(ChecksumError, match=f"row {row} of table 0"):
            read_rows(tier, WIDE, keys_of(0, [row]))
        check_rows(tier, WIDE, keys_of(0, np.setdiff1d(ALL, np.arange(row, row + ROWS))), version)
        with pytest.raises(ChecksumError, match=f"row {row} of table 0 in segment"):
            tier.verify()


def test_free_pages_at_the_end_may_be_missing(written: Path) -> None:
    path = written / "rows.lmdb"
    with plain_lmdb(written, write=True) as txn:
        for number in range(20):
            txn.put(struct.pack(">QQ", 1 << 50, number), bytes(4080))
        for number in range(20):
            txn.delete(struct.pack(">QQ", 1 << 50, number))
    assert path.stat().st_size < (newest_meta(path).last_page + 1) * PAGE
    with writing(written) as tier:
        check_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
        write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 2)
        commit(tier, b"")
        tier.verify()


def test_another_lmdb_file(tmp_path: Path) -> None:
    with plain_lmdb(tmp_path, write=True) as txn:
        txn.put(b"some key 16 byte", b"value")
    with pytest.raises(FormatError, match="not a tierstore file"):
        open_tier(tmp_path)


def test_a_segment_missing_from_the_tree(written: Path) -> None:
    number = place(written, 0).number
    with plain_lmdb(written, write=True) as txn:
        assert txn.delete(segment_key(number))
    with pytest.raises(DamagedError, match=r"its tree has \d+ segments, and its record of the log counts \d+ others"):
        open_tier(written)


def test_a_segment_of_another_size(written: Path) -> None:
    number = place(written, 0).number
    with plain_lmdb(written, write=True) as txn:
        value = bytes(txn.get(segment_key(number)))
        txn.put(segment_key(number), value + bytes(PAGE))
    with reading(written) as tier, pytest.raises(DamagedError, match=f"segment {number} cannot be one of its tables'"):
        read_rows(tier, WIDE, keys_of(0, [0]))
    with plain_lmdb(written, write=True) as txn:
        txn.put(segment_key(number), value[:-8])
    with pytest.raises(DamagedError, match=f"segment {number}, which does not fill its pages"):
        open_tier(written)


def test_a_damaged_payload(written: Path) -> None:
    with writing(written) as tier:
        tier.commit(b"two", 2, keep=2)
    with plain_lmdb(written, write=True) as txn:
        txn.put(item_key(version_item(1, 0)), b"Payload" * 1000)
    with reading(written) as tier:
        assert tier.payload == b"two"
        with pytest.raises(ChecksumError, match="the payload of version 1 is damaged"):
            tier.verify()
    with (
        contextlib.closing(open_tier(written, readonly=True, version=1)) as tier,
        pytest.raises(ChecksumError, match="payload"),
    ):
        _ = tier.payload
