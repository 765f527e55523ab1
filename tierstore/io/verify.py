"""Checking every stored segment, in the order in which they lie, slice by slice, the next ones read ahead."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import inline, kernel
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, MAX_ROWS, PAGE_HEADER_WORDS
from .base import VerifyReport
from .mapped import queue_parts
from .places import Segments, TableArrays, can_be_stored
from .records import read_head, read_payload, read_record, require_logged
from .row_map import RowMap
from .segments import (
    KEYS,
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
)
from .snapshot import Snapshot

SLICE_SEGMENTS: Final = 128  # 8 MiB, if they are full and of rows that fit a page
_MERGED_PAGES: Final = 16  # pages between two segments up to which reading them too is cheaper than another request
_LISTED: Final = 10_000
_NAMED: Final = 8
_BAD_INDEX, _BAD_BLOCK = int(SegmentStatus.BAD_INDEX), int(SegmentStatus.BAD_BLOCK)
_BAD_ROW, _BAD_PADDING = int(SegmentStatus.BAD_ROW), int(SegmentStatus.BAD_PADDING)

_FOUND: Final = np.dtype(
    [("key", np.int64), ("number", np.uint64), ("status", np.int64), ("start", np.int64), ("stop", np.int64)]
)
"""A damaged row, or, with key -1, something else of a segment; words ``[start, stop)`` of the file hold it."""


def verify_segments(snapshot: Snapshot, rows: RowMap, progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Check all that a tree leads to; see ``ColdTier.verify``. Of segments of tables that are not in the map, the index
    alone is checked. DamagedError: the tree, a record or a payload is not what was written; or, when all segments were
    read, some are not: names the first places and says how many there are."""
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
    return VerifyReport(int(np.count_nonzero(counts)), verifier.segments, sum(counts), verifier.pages * page_bytes)


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
            own = np.flatnonzero((layout_ids == segments.geo.layout_id) & (statuses == 0))
            fits = segments.fits(stored[own])
            statuses[own[~fits]] = _BAD_INDEX
            self._look_into(segments, stored[own[fits]])
        bad = np.flatnonzero(statuses)
        self._note([(-1, int(stored["number"][i]), int(statuses[i])) for i in bad])

    def _look_into(self, segments: Segments, stored: Stored) -> None:
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
