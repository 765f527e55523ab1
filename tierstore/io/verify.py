"""Reading and checking every stored segment, at the rate at which the device reads its files from end to end.

In a file that has been in use, segments that follow one another by number lie anywhere. So they are read in the order
in which they lie, a slice of them at a time, the slices that follow being read meanwhile. A salvage reads what of a
damaged file is sound.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.jit import inline, kernel
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, MAX_ROWS, PAGE_HEADER_WORDS, ROW_MASK
from .base import VerifyReport
from .mapped import FileMap, copy_words, queue_parts
from .places import Places, Segments, TableArrays, can_be_stored
from .records import read_head, read_payload, read_record, require_logged
from .row_map import RowMap
from .segments import (
    KEYS,
    MAX_BLOCKS,
    Geometry,
    SegmentStatus,
    Stored,
    block_word,
    byte_ranges,
    damage_error,
    is_sound_row,
    look_at_indexes,
    read_ahead,
    refused_status,
    rows_listed,
    stored_segments,
    unpack_block_word,
)
from .snapshot import Snapshot
from .superblock import Remains

T = TypeVar("T")

SLICE_SEGMENTS: Final = 128  # 8 MiB, if they are full and of rows that fit a page
_MERGED_PAGES: Final = 16  # pages between two segments up to which reading them too is cheaper than another request
_LISTED: Final = 10_000
_NAMED: Final = 8
_BAD_INDEX: Final = int(SegmentStatus.BAD_INDEX)
_BAD_BLOCK: Final = int(SegmentStatus.BAD_BLOCK)
_BAD_ROW: Final = int(SegmentStatus.BAD_ROW)
_BAD_PADDING: Final = int(SegmentStatus.BAD_PADDING)

_FOUND: Final = np.dtype(
    [("key", np.int64), ("number", np.uint64), ("status", np.int64), ("start", np.int64), ("stop", np.int64)]
)
"""A damaged row, or, with key -1, something else of a segment; words ``[start, stop)`` of the file hold it."""


def verify_segments(snapshot: Snapshot, rows: RowMap, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check all that a tree leads to; see ``ColdTier.verify``. ``progress`` gets how much of the file was passed. Of
    segments of tables that are not in the map, the index alone is checked. DamagedError: the tree, a record or a
    payload is not what was written; or, when all segments were read, some are not: names the first places and says how
    many there are."""
    snapshot.check_free_pages()
    for version in read_head(snapshot).kept:
        read_payload(snapshot, read_record(snapshot, version))
    stored = stored_segments(snapshot)
    require_logged(snapshot, stored)
    stored, page_bytes = stored[np.argsort(stored["first_page"])], snapshot.page_bytes
    verifier, total = Verifier(snapshot, rows), snapshot.limit_pages() * page_bytes

    def queue(part: slice) -> None:
        starts, stops = byte_ranges(stored[part], page_bytes)
        is_first = np.append(True, starts[1:] > stops[:-1] + _MERGED_PAGES * page_bytes)
        queue_parts(snapshot.file_map.rows.address, starts[is_first], stops[np.roll(is_first, -1)])

    for part in read_ahead(len(stored), SLICE_SEGMENTS, queue):
        verifier.look_at(stored[part])
        if progress is not None:
            progress(int(byte_ranges(stored[part], page_bytes)[1][-1]), total)
    if progress is not None:
        progress(total, total)
    verifier.require_sound()
    counts = rows.counts()
    return VerifyReport(
        tables=int(np.count_nonzero(counts)),
        segments=verifier.segments,
        rows=sum(counts),
        bytes=verifier.pages * page_bytes,
    )


class Verifier:
    """Checks segments, and notes what is damaged. ``segments``, ``pages``: of known tables, that were checked whole."""

    def __init__(self, snapshot: Snapshot, rows: RowMap) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._found = np.zeros(_LISTED, _FOUND)
        self._places: list[tuple[int, int, int]] = []  # key, number and status of what is damaged, as _FOUND
        self._num_places = 0
        self.segments = self.pages = 0

    def look_at(self, stored: Stored) -> None:
        statuses = look_at_indexes(self._snapshot, stored)
        layout_ids = self._rows.layout_ids(stored)
        for segments in self._rows.segments.values():
            own = np.flatnonzero((layout_ids == segments.geo.layout_id) & (statuses == SegmentStatus.DONE))
            fits = segments.fits(stored[own])
            statuses[own[~fits]] = SegmentStatus.BAD_INDEX
            self._look_into(segments, stored[own[fits]])
        bad = np.flatnonzero(statuses != SegmentStatus.DONE)
        self._note([(-1, int(stored["number"][i]), int(statuses[i])) for i in bad])

    def _look_into(self, segments: Segments, stored: Stored) -> None:
        """Check segments of one layout, whose indexes and sizes are sound."""
        file_map = self._snapshot.file_map.rows
        since = file_map.guard.begin()
        count = _check_segments(
            segments.geo, file_map.words, stored, segments.data_pages(stored), self._rows.tables, self._found
        )
        self._num_places += max(0, count - _LISTED)
        found = self._found[:count]
        if (refused := file_map.guard.refused(since)) is not None:
            met = refused.meet(found["start"] * 8, found["stop"] * 8)
            found["status"][met] = status = refused_status(refused)
            # What was zero anyhow, or read before another reader was refused, is noted nowhere.
            unread = stored["number"][refused.meet(*byte_ranges(stored, self._snapshot.page_bytes))]
            self._note([(-1, number, status) for number in np.setdiff1d(unread, found["number"][met]).tolist()])
        self._note(found[["key", "number", "status"]].tolist())
        self.segments += len(stored)
        self.pages += int(stored["pages"].sum())

    def _note(self, places: list[tuple[int, int, int]]) -> None:
        self._num_places += len(places)
        self._places = (self._places + places)[:_LISTED]

    def require_sound(self) -> None:
        if not self._num_places:
            return
        named = []
        for key, number, status in sorted(self._places)[:_NAMED]:
            row = f"row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} in " if key >= 0 else ""
            named.append((f"{row}segment {number}", status))
        more = self._num_places - _NAMED
        words = f"; and {more:,} more places, {self._num_places:,} in all" if more > 0 else ""
        raise damage_error(self._snapshot.path, named, words)


@inline
def _note(found: Any, count: int, key: int | np.int64, number: np.uint64, status: int, start: int, stop: int) -> int:
    if count < len(found):
        place = found[count]
        place["key"], place["number"], place["status"] = key, number, status
        place["start"], place["stop"] = start, stop
    return count + 1


@inline
def _is_zero(words: Words, start: int, stop: int) -> bool:
    while start < stop and words[start] == np.uint64(0):
        start += 1
    return start >= stop


@kernel
def _check_segments(
    geo: Geometry, words: Words, stored: Stored, data_pages: Int64s, tables: TableArrays, found: Any
) -> int:
    """Check segments of one layout, whose indexes and sizes were found sound: keys, blocks, rows, and what is to be
    zeros. ``found`` receives what is damaged, as far as there is room; returns how many places are."""
    count, row_words = 0, geo.weight_words + geo.state_words
    for s in range(len(data_pages)):
        number, newest = stored[s]["number"], np.uint64(stored[s]["newest"])
        at, start = stored[s]["first_page"] * geo.page_words + PAGE_HEADER_WORDS, data_pages[s] * geo.page_words
        num, is_mixed = rows_listed(words, at)
        for i in range(num):
            if not can_be_stored(np.int64(words[at + KEYS + i]), geo.layout_id, tables):
                count = _note(found, count, -1, number, _BAD_INDEX, at, start)
                break
        if not _is_zero(words, at + KEYS + num * (2 if is_mixed else 1), start):
            count = _note(found, count, -1, number, _BAD_PADDING, at, start)
        for block in range((num + geo.rows_per_block - 1) // geo.rows_per_block):
            first = block * geo.rows_per_block
            rows = min(geo.rows_per_block, num - first)
            header = block_word(number, newest, block, rows, first + rows == num)
            if words[start] != number or words[start + 1] != header:
                count = _note(found, count, -1, number, _BAD_BLOCK, start, start + BLOCK_HEADER_WORDS)
            for i in range(rows):
                key = words[at + KEYS + first + i]
                if not is_sound_row(geo, words, start, i, key, number, first + i):
                    pair = start + BLOCK_HEADER_WORDS + i * geo.pair_stride
                    row_end = start + geo.first_row + i * geo.row_stride + row_words
                    count = _note(found, count, np.int64(key), number, _BAD_ROW, pair, row_end)
            stop = start + geo.pages_per_block * geo.page_words
            # Between pairs and rows, if they lie apart, and behind the rows.
            pairs_end = start + BLOCK_HEADER_WORDS + rows * geo.pair_stride
            rows_end = start + geo.first_row + (rows - 1) * geo.row_stride + row_words
            if not _is_zero(words, pairs_end, start + geo.first_row) or not _is_zero(words, rows_end, stop):
                count = _note(found, count, -1, number, _BAD_PADDING, pairs_end, stop)
            start = stop
    return count


# Salvage: the same checks, passing over what is damaged. A segment whose index is damaged is read block by block: each
# says what it is, and names its rows. Of a row's entries the newest is the one in the segment with the largest (newest
# epoch, number). It is certain unless there is a newer segment of which a row is not known, as neither the row nor the
# index can be read.

SAVED: Final = 1
LOST: Final = 2
"""In the place of a row in a map: a row that was taken, or of which an entry was found and none was taken."""

Runs = NDArray[Any]  # rows in their order in a segment, of dtype ``RUN``: all, where its index is sound, or a block's
RUN: Final = np.dtype(
    [("number", np.uint64)]
    + [(name, np.int64) for name in ("newest", "index_page", "data_page", "first", "rows", "sound", "is_last")]
)
"""Number of the segment, and newest epoch of its rows; the page of the index that has the rows' keys, or 0; where the
first row's block begins, and that row's number in the segment; how many rows there are. Of a block, how many of these
match their checksums, and whether it is the segment's last one."""


def settled(file_map: FileMap, call: Callable[[], T]) -> T:
    """What a call comes to that reads a file: it is called again while pages are refused, which show zeros then."""
    while True:
        met = file_map.guard.met
        result = call()
        if file_map.guard.refused(met) is None:
            return result


class Survivors(NamedTuple):  # rows of the last version, those of newer segments first
    runs: list[Runs]  # by layout
    proven: list[Bools]  # by layout, bool [runs]: no segment of which rows are not known can have newer ones
    missing: int  # segments of which rows are not known; -1 where a part of the tree is


def surviving_rows(remains: Remains, rows: RowMap) -> Survivors:
    """Where the rows of the last version are, and which of them are certain to be. DamagedError: a segment holds what
    cannot be rows of the tables."""
    stored, version = remains.stored, remains.version
    statuses = look_at_indexes(remains, stored)
    known, bad = stored[statuses == 0], stored[statuses != 0]
    layout_ids = _layout_ids(remains, rows, known)
    blocks = [_find_blocks(remains.file_map, segments.geo, bad) for segments in rows.segments.values()]
    lost = np.setdiff1d(bad["number"], np.concatenate([np.zeros(0, RUN), *blocks])["number"])
    unknown = [(version, number) for number in lost.tolist()]
    all_runs, proven, missing = [], [], len(lost)
    for segments, own in zip(rows.segments.values(), blocks, strict=True):
        shown = own[own["newest"] <= version]
        incomplete = _incomplete(segments.geo, shown)
        missing += len(incomplete)
        runs = np.concatenate([_indexed_runs(remains, segments, known[layout_ids == segments.geo.layout_id]), shown])
        runs = runs[runs["newest"] <= version]
        runs = runs[np.lexsort((runs["number"], runs["newest"]))[::-1]]
        epoch, number = max(incomplete + unknown, default=(0, 0))
        is_newer = (runs["newest"] > epoch) | ((runs["newest"] == epoch) & (runs["number"] >= np.uint64(number)))
        all_runs.append(runs)
        proven.append(is_newer & remains.is_whole)
    return Survivors(all_runs, proven, missing if remains.is_whole else -1)


def _layout_ids(remains: Remains, rows: RowMap, stored: Stored) -> Int64s:
    """Of segments, by the first row of a table that is known; -1 if there is none."""
    found, known = rows.layout_ids(stored), rows.tables.layout_ids
    for i in np.flatnonzero(found < 0).tolist():
        at = int(stored["first_page"][i]) * remains.page_bytes // 8 + PAGE_HEADER_WORDS + KEYS
        tables = remains.file_map.words[at : at + int(stored["rows"][i])] >> np.uint64(KEY_ROW_BITS)
        ids = known[tables[tables < len(known)].astype(np.int64)]
        found[i] = next(iter(ids[ids >= 0].tolist()), -1)
    return found


def _indexed_runs(remains: Remains, segments: Segments, stored: Stored) -> Runs:
    if not (fits := segments.fits(stored)).all():
        raise DamagedError(
            f"{remains.path}: segment {stored['number'][int(np.argmin(fits))]} cannot be one of its tables' rows: "
            "the manifest is of other tables; give the store's own with --manifest FILE"
        )
    runs = np.zeros(len(stored), RUN)
    for name in ("number", "newest", "rows"):
        runs[name] = stored[name]
    runs["index_page"], runs["data_page"] = stored["first_page"], segments.data_pages(stored)
    return runs


def _find_blocks(file_map: FileMap, geo: Geometry, stored: Stored) -> Runs:
    """The blocks of a layout in these segments, of which each page is looked at, that have a sound row at least."""
    starts, limit = np.maximum(stored["first_page"], 2), file_map.file_bytes() // (8 * geo.page_words)
    stops = np.minimum(stored["first_page"] + stored["pages"], limit + 1 - geo.pages_per_block)
    found = np.zeros(int(np.maximum(stops - starts, 0).sum()), RUN)
    numbers = stored["number"].copy()
    count = settled(file_map, lambda: _list_blocks(geo, file_map.words, numbers, starts, stops, found))
    return found[:count]


@kernel
def _list_blocks(geo: Geometry, words: Words, numbers: Words, starts: Int64s, stops: Int64s, found: Runs) -> int:
    """List the blocks of a layout that begin on pages ``[starts[s], stops[s])`` of segments; returns how many."""
    out = 0
    for s in range(len(numbers)):
        for page in range(starts[s], stops[s]):
            at = page * geo.page_words
            newest, block, is_last = unpack_block_word(words[at + 1])
            rows, first, sound = geo.rows_per_block, block * geo.rows_per_block, 0
            pair = at + BLOCK_HEADER_WORDS + (rows - 1) * geo.pair_stride
            while is_last and rows > 0 and words[pair] == np.uint64(0) and words[pair + 1] == np.uint64(0):
                rows -= 1
                pair -= geo.pair_stride
            if words[at] != numbers[s] or block_word(numbers[s], newest, block, rows, is_last) != words[at + 1]:
                continue
            for i in range(rows):
                key = words[at + BLOCK_HEADER_WORDS + i * geo.pair_stride]
                sound += 1 if is_sound_row(geo, words, at, i, key, numbers[s], first + i) else 0
            if sound > 0:
                run = found[out]
                run["number"], run["newest"], run["data_page"] = numbers[s], np.int64(newest), page
                run["first"], run["rows"], run["sound"], run["is_last"] = first, rows, sound, is_last
                out += 1
    return out


def _incomplete(geo: Geometry, blocks: Runs) -> list[tuple[int, int]]:
    """Newest epoch and number of the segments of these blocks of which a row cannot be read."""
    numbers, which = np.unique(blocks["number"], return_inverse=True)
    newest, last = np.zeros(len(numbers), np.int64), np.full(len(numbers), MAX_BLOCKS)
    nth, is_last = blocks["first"] // geo.rows_per_block, blocks["is_last"] > 0
    is_whole = blocks["sound"] == blocks["rows"]
    newest[which], last[which[is_last]] = blocks["newest"], nth[is_last]
    whole = np.unique(which[is_whole] * MAX_BLOCKS + nth[is_whole])
    bad = np.bincount(whole // MAX_BLOCKS, minlength=len(numbers)) != last + 1
    return list(zip(newest[bad].tolist(), numbers[bad].tolist(), strict=True))


@kernel
def read_rows(
    geo: Geometry, words: Words, limit: int, runs: Runs, keys: Int64s, sound: Bools, weights: Words, state: Words
) -> int:
    """Copy the sound rows of runs of one layout; returns how many rows there are.

    Args:
        limit: pages in the file.
        keys: int64 [n], receives the rows' keys in their order; -1 where a damaged row leaves only itself to tell.
        sound: bool [n], receives which of them match their checksums.
        weights, state: flat, receive the sound rows at their positions in ``keys``.
    """
    out = 0
    for run in range(len(runs)):
        number, data_page = runs[run]["number"], runs[run]["data_page"]
        is_listed = runs[run]["index_page"] > 0
        listed = runs[run]["index_page"] * geo.page_words + PAGE_HEADER_WORDS + KEYS
        for i in range(runs[run]["rows"]):
            block = i // geo.rows_per_block
            page, in_block = data_page + block * geo.pages_per_block, i - block * geo.rows_per_block
            at = page * geo.page_words
            key = words[listed + i] if is_listed else words[at + BLOCK_HEADER_WORDS + in_block * geo.pair_stride]
            is_in_file = page + geo.pages_per_block <= limit
            index = runs[run]["first"] + i
            sound[out] = is_in_file and is_sound_row(geo, words, at, in_block, key, number, index)
            keys[out] = np.int64(key) if is_listed or sound[out] else -1
            if sound[out]:
                row = at + geo.first_row + in_block * geo.row_stride
                copy_words(weights, out * geo.weight_words, words, row, geo.weight_words)
                copy_words(state, out * geo.state_words, words, row + geo.weight_words, geo.state_words)
            out += 1
    return out


@kernel
def choose_rows(
    layout_id: int, tables: TableArrays, places: Places, keys: Int64s, sound: Bools, proven: Bools, stale_ok: bool,
    taken: Int32s,
) -> tuple[int, int]:  # fmt: skip
    """Choose rows of one layout, given from the newest segment to the oldest: of each the first, if it is sound.
    Returns how many are taken, and how many of these may be, or are, older than the version.

    Args:
        places: by row, as in a ``RowMap``; receives SAVED and LOST.
        proven: bool [rows], no row of a newer segment can be missing.
        stale_ok: also take what is not proven, and older ones in place of damaged ones.
        taken: int32 [rows], receives the positions of the rows that are taken.
    """
    count, unproven = 0, 0
    for i in range(len(keys)):
        table, row = keys[i] >> KEY_ROW_BITS, keys[i] & ROW_MASK
        if table < 0 or table >= len(tables.bases) or tables.layout_ids[table] != layout_id:
            continue
        if row >= tables.num_rows[table]:
            continue
        position = tables.bases[table] + row
        is_certain = places[position] == 0 and proven[i]
        if places[position] == 0:
            places[position] = LOST
        if places[position] == LOST and sound[i] and (is_certain or stale_ok):
            places[position] = SAVED
            taken[count] = i
            count += 1
            unproven += 0 if is_certain else 1
    return count, unproven
