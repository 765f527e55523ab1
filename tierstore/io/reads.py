"""Reading stored rows: a batch by keys, those changed since a version, or all in the order of another file."""

import math
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..layout import KEY_ROW_BITS, MAX_ROWS, ROW_MASK, RowLayout
from ..system.sizes import free_memory_bytes
from .cold import FAILED, read_cold
from .gather import How, Scratch, Source, Target, gather, gather_error, new_scratch
from .guard import Guard
from .row_map import RowMap
from .segments import Geometry, SegmentStatus
from .snapshot import Snapshot
from .tail import RowPlaces

_LIST_STEP: Final = 1 << 20
_DONE, _OUT_OF_FILE = int(SegmentStatus.DONE), int(SegmentStatus.OUT_OF_FILE)  # which Python takes 2 us to look up
_ASK_SECONDS, _PARTS = 1.0, 2  # a file larger than so many times the memory left is read past the page cache


class KeyedRows(NamedTuple):
    """Rows of one layout: as they are stored, or to be appended."""

    keys: Int64s  # int64 [n]
    slots: Int32s  # int32 [n], in the arenas; from 0 on for rows that were read
    weights: Words  # the arena, uint64 [slots, words]
    state: Words  # likewise
    epochs: Words  # of rows to be appended: uint64 [1], of all rows, or [n]
    pages: int = 0  # that they were read from


class RowReader:
    """Gathers rows from a file, and remembers whether its pages were in memory the last time.

    Args:
        verify: compare each row with its checksum.

    Attributes:
        is_cold: pages were not in memory the last time.
        is_large: cold pages are read past the page cache, as memory was found at the time ``asked_at``.
    """

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify
        self.is_cold = self.is_large = False
        self.asked_at = -math.inf
        self._can_sample: bool | None = None

    def stored(self, snapshot: Snapshot, rows: RowMap, keys: Int64s) -> KeyedRows:
        """Rows of one layout that were written; at least one. ChecksumError, TruncatedError, UnreadableError: a row is
        damaged; names it."""
        layout, count = rows.layouts[int(keys[0]) >> KEY_ROW_BITS], len(keys)
        weights, state = (np.empty((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
        slots, present = np.arange(count, dtype=np.int32), np.empty(count, np.bool_)
        result = self.gather(snapshot, rows, layout, keys, slots, weights, state, present)
        if result[0] != _DONE:
            raise gather_error(snapshot.path, result, keys)
        assert present.all(), "a row of the map was not read"
        return KeyedRows(keys, slots, weights, state, np.empty(0, np.uint64), int(result[2]))

    def gather(
        self, snapshot: Snapshot, rows: RowPlaces, layout: RowLayout, keys: Int64s, slots: Int32s, weights: Words,
        state: Words, present: Bools,
    ) -> Int64s:  # fmt: skip
        """Copy rows of one layout as ``ColdTier.read`` does; the result of ``gather.gather``."""
        whole_map, segments = snapshot.file_map, rows.segments[layout]
        if self._can_sample is None:
            self._can_sample = whole_map.tells_residency()
        positions, places = rows.find(layout, keys)
        if not segments.rows:  # as in a new store, whose first batches need not wait for the kernel to be compiled
            present[:] = False
            return np.zeros(5, np.int64)
        target = Target(slots, weights.reshape(-1), state.reshape(-1), present)
        geo, arrays, limit = segments.geo, segments.arrays, snapshot.limit_pages()
        while True:
            file_map = whole_map.rows  # a map of its own: pages of rows that cannot be read are nobody else's trouble
            since = file_map.guard.begin()
            source = Source(file_map.words, file_map.address, limit)
            how = How(self._verify, self._can_sample, self.is_cold, self._outgrows_memory(limit * geo.page_words * 8))
            scratch, result = new_scratch(geo, limit, len(keys)), np.zeros(5, np.int64)
            gather(geo, source, places, arrays, keys, positions, target, how, scratch, result)
            if result[0] == _DONE:
                self.is_cold = result[3] < len(keys) and read_cold(
                    geo, file_map.pins.rings, source, keys, target, how, scratch, result
                )
                if result[0] == FAILED:
                    continue
            if result[0] != _OUT_OF_FILE:
                if not file_map.guard.is_clean(since):
                    _look_for_refused(file_map.guard, since, geo, scratch, result)
                return result
            # A place entered while we read may lie in what the file, or the list of segments, grew by meanwhile.
            whole_map = whole_map.reaching(whole_map.pins.size_bytes())
            known, arrays = (limit, len(arrays.numbers)), segments.arrays
            limit = whole_map.file_bytes() // snapshot.page_bytes
            if (limit, len(arrays.numbers)) == known:
                return result

    def _outgrows_memory(self, size_bytes: int) -> bool:
        if (now := time.monotonic()) > self.asked_at + _ASK_SECONDS:
            self.asked_at, self.is_large = now, size_bytes > _PARTS * free_memory_bytes()
        return self.is_large


def _look_for_refused(guard: Guard, since: int, geo: Geometry, scratch: Scratch, result: Int64s) -> None:
    """Have the result say so if a row lies on a page that was refused since, whatever was found there."""
    refused = guard.refused(since)
    starts, stops = scratch.pairs * 8, (scratch.offsets + geo.row_words) * 8
    met = refused.meet(starts, stops) & (scratch.offsets != 0)
    if met.any():
        is_cut = guard.is_cut_short(refused)
        result[0] = SegmentStatus.OUT_OF_FILE if is_cut else SegmentStatus.UNREADABLE
        result[1] = int(np.argmax(met))


# Rows of one file are appended to another in batches that fill whole segments.


def by_key(rows: RowMap, tables: Iterable[int], since: int = 0) -> Iterator[Int64s]:
    """Keys of the stored rows of some tables, table by table, ascending, in parts; ``since`` as for
    ``RowMap.stored_rows``."""
    for table in tables:
        for part in rows.stored_rows(table, since):
            yield part | (table << KEY_ROW_BITS)


def some_first(rows: RowMap, layout: RowLayout, leading: Int64s, since: int = 0) -> Iterator[Int64s]:
    """Keys of the stored rows of a layout, in parts: the leading ones in their order, then the others by key.
    ``leading``: int64 [n], distinct keys."""
    for first in range(0, len(leading), _LIST_STEP):
        part = leading[first : first + _LIST_STEP]
        yield part[rows.is_stored(layout, part, since)]
    known = np.sort(leading)
    for part in by_key(rows, (table for table, own in rows.layouts.items() if own == layout), since):
        first, stop = np.searchsorted(known, part[[0, -1]] + [0, 1]) if len(part) else (0, 0)
        yield part[np.isin(part, known[first:stop], assume_unique=True, invert=True)]


def stored_batches(snapshot: Snapshot, rows: RowMap, parts: Iterable[Int64s], size: int) -> Iterator[KeyedRows]:
    """Stored rows of one layout, in the order of their keys, ``size`` at a time; the last batch is what is left.
    ChecksumError, TruncatedError, UnreadableError: a row is damaged; names it."""
    reader = RowReader(verify=True)
    for keys in _batches(parts, size):
        yield reader.stored(snapshot, rows, keys)


def _batches(parts: Iterable[Int64s], size: int) -> Iterator[Int64s]:
    waiting = np.empty(0, np.int64)
    for part in parts:
        waiting = np.concatenate([waiting, part])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if len(waiting):
        yield waiting


CHUNK_BYTES: Final = 8 << 20  # rows with their state that are read at a time


class ChangedRows(NamedTuple):
    """Some rows of a table, ascending."""

    rows: Int64s  # int64 [n]
    weights: Words  # uint64 [n, weight words], as they are now


class Changes:
    """Rows written since a version, by the indexes of segments; made by ``LmdbColdTier.changes``.

    That is what changed only if the current version was made from the earlier one, as its lineage says.
    """

    def __init__(self, snapshot: Snapshot, rows: RowMap, since: int) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._since = since

    @cached_property
    def written(self) -> Int64s:
        """Keys of the rows that were written since, ascending; some of them may be set, of which ``rows`` then are."""
        return self._rows.written_since(self._snapshot, self._since)

    def rows(self, table: int) -> Iterator[ChangedRows]:
        """The table's changed rows, in ascending chunks; none is empty. ChecksumError, TruncatedError: a row is
        damaged."""
        step = max(1, CHUNK_BYTES // self._rows.layouts[table].row_bytes)
        for batch in stored_batches(self._snapshot, self._rows, self._keys(table), step):
            yield ChangedRows(batch.keys & ROW_MASK, batch.weights)

    def _keys(self, table: int) -> Iterable[Int64s]:
        if not self._since:
            return by_key(self._rows, [table])
        first, stop = np.searchsorted(self.written, [table * MAX_ROWS, (table + 1) * MAX_ROWS])
        return [self.written[first:stop]]
