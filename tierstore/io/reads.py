"""Reading stored rows: a batch by keys, those changed since a version, or all in the order of another file.

A batch is copied from the map until its pages turn out not to be in memory (``gather.py``). The rest is read in the
order of the file, each page once, many at a time: past the page cache into the buffers of a ring (``uring.py``), or
without one (``madvise``) into the page cache. Pages that are there already come through the map. To ask about each
(``mincore``) would take a third of the time; so one in ``_LOOK_EVERY`` is asked about, and the ``_LOOK_ON`` after one
that was there. Either way is right: what a lease shows does not change, and the system writes a page to the device
before it reads it directly.
"""

import math
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.jit import uncounted_helper as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import KEY_ROW_BITS, MAX_ROWS, PAIR_WORDS, ROW_MASK, RowLayout
from ..system.sizes import free_memory_bytes
from .gather import How, Scratch, Source, Target, copy_rows, first_bad, gather, gather_error, new_scratch
from .mapped import is_resident, queue_read
from .row_map import RowMap, RowPlaces
from .segments import Geometry, SegmentStatus
from .snapshot import Snapshot
from .uring import BUFFER_WORDS, DEPTH, Queues, Rings, begin_read, wait

CHUNK_BYTES: Final = 8 << 20  # changed rows, with their state, that are read at a time
_LIST_STEP: Final = 1 << 20
# Members of an IntEnum, which Python takes 2 us to look up.
_DONE, _OUT_OF_FILE = int(SegmentStatus.DONE), int(SegmentStatus.OUT_OF_FILE)
_BAD_ROW, _UNREADABLE = int(SegmentStatus.BAD_ROW), int(SegmentStatus.UNREADABLE)
_FAILED: Final = -1
"""A read of a ring failed, and the system does not say that the device is to blame: read again, without a ring."""
_ASK_SECONDS, _PARTS = 1.0, 2  # a file larger than so many times the free memory is read past the page cache
_QUEUE_DEPTH: Final = 512  # reads that ``madvise`` is called for ahead of the copy
_LOOK_EVERY: Final = 16
_LOOK_ON: Final = 64
_COLD_PART: Final = 64  # where one page in so many had to be read, the next batch is expected to be cold
_OF_DEVICE: Final = -5, -61  # EIO, ENODATA


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
        if (now := time.monotonic()) > self.asked_at + _ASK_SECONDS:
            self.asked_at, self.is_large = now, limit * snapshot.page_bytes > _PARTS * free_memory_bytes()
        while True:
            file_map = whole_map.rows  # a map of its own: pages of rows that cannot be read are nobody else's trouble
            guard, source = file_map.guard, Source(file_map.words, file_map.address, limit)
            since = guard.begin()
            how = How(self._verify, self._can_sample, self.is_cold, self.is_large)
            scratch, result = new_scratch(geo, limit, len(keys)), np.zeros(5, np.int64)
            gather(geo, source, places, arrays, keys, positions, target, how, scratch, result)
            if result[0] == _DONE:
                self.is_cold = result[3] < len(keys) and _read_cold(
                    geo, file_map.locks.rings, source, keys, target, how, scratch, result
                )
                if result[0] == _FAILED:
                    continue
            if result[0] != _OUT_OF_FILE:
                if not guard.is_clean(since):  # a row on a page that was refused is bad, whatever was found there
                    refused = guard.refused(since)
                    met = refused.meet(scratch.pairs * 8, (scratch.offsets + geo.row_words) * 8) & (
                        scratch.offsets != 0
                    )
                    if met.any():
                        status = _OUT_OF_FILE if guard.is_cut_short(refused) else _UNREADABLE
                        result[0], result[1] = status, np.argmax(met)
                return result
            # A place entered while we read may lie in what the file, or the list of segments, grew by meanwhile.
            whole_map = whole_map.reaching(whole_map.locks.size_bytes())
            known, arrays = (limit, len(arrays.numbers)), segments.arrays
            limit = whole_map.file_bytes() // snapshot.page_bytes
            if (limit, len(arrays.numbers)) == known:
                return result


class _Batch(NamedTuple):
    """Rows to be read, in the order of their places."""

    geo: Geometry
    queues: Queues
    depth: int  # reads in flight
    keys: Int64s
    target: Target
    how: How
    scratch: Scratch
    result: Int64s


def _read_cold(
    geo: Geometry, rings: Rings, source: Source, keys: Int64s, target: Target, how: How, scratch: Scratch,
    result: Int64s,
) -> bool:  # fmt: skip
    """Copy the rows that ``gather`` did not, of which ``scratch`` says where they lie.

    Returns:
        Whether pages were not in memory. The status may be _FAILED.
    """
    target.present[result[3] :] = False
    order = result[3] + np.flatnonzero(scratch.pairs[result[3] :])
    order = order[np.argsort(scratch.pairs[order])]
    ordered = target._replace(slots=target.slots[order], present=np.empty(len(order), np.bool_))
    by_page = scratch._replace(offsets=scratch.offsets[order], pairs=scratch.pairs[order], seeds=scratch.seeds[order])
    depth = min(DEPTH, BUFFER_WORDS // (geo.pages_per_block * geo.page_words))
    ring = rings.take() if how.direct and depth > 0 else None
    depth = depth if ring else _QUEUE_DEPTH
    queues = ring.queues if ring and ring.queues else Queues(-1, source.words, np.empty((depth, 4), np.int64))
    is_cold = _read_sorted(_Batch(geo, queues, depth, keys[order], ordered, how, by_page, result), source)
    if ring:
        rings.put_back(ring, has_failed=result[0] == _FAILED)
    target.present[order] = True
    result[1] = order[result[1]] if result[0] else 0
    return bool(is_cold)


@inline
def _take_rows(batch: _Batch, words: Words, shift: int, start: int, stop: int) -> None:
    """Copy rows that lie ``shift`` words further in the file than in ``words``, unless there was an error before."""
    geo, scratch, result = batch.geo, batch.scratch, batch.result
    if result[0] != 0:
        return
    for i in range(start, stop if shift != 0 else start):
        scratch.offsets[i] -= shift
        scratch.pairs[i] -= shift
    copy_rows(geo, words, start, stop, scratch.offsets, batch.target)
    if batch.how.verify:
        bad = first_bad(words, geo.weight_words + geo.state_words, start, stop, batch.keys, scratch)
        if bad >= 0:
            result[0], result[1] = _BAD_ROW, bad


@kernel
def _read_sorted(batch: _Batch, source: Source) -> bool:
    geo, queues, depth, keys, _, how, scratch, result = batch
    words, address, _ = source
    pairs, page_words, num = scratch.pairs, geo.page_words, len(keys)
    stored_words = 1 if geo.pages_per_block == 1 else geo.weight_words + geo.state_words + PAIR_WORDS
    at = begun = ended = looks = units = pages = 0
    counted = -1  # pages up to this one
    while ended < begun or (at < num and result[0] == 0):
        if begun - ended == depth or at == num or result[0] != 0:
            slot, shift = ended % depth, 0
            start, page, size = queues.reads[slot, 0], queues.reads[slot, 2], queues.reads[slot, 3]
            if result[0] != _FAILED and queues.descriptor >= 0:
                shift = (page - slot * geo.pages_per_block) * page_words
                got = wait(queues, slot)
                if got != size and (result[0] == 0 or got > size):
                    result[0], result[1] = _UNREADABLE if got in _OF_DEVICE else _FAILED, start
            _take_rows(batch, queues.buffers, shift, start, queues.reads[slot, 1])
            ended += 1
            continue
        page, stop, is_there = pairs[at] // page_words, at + 1, False
        while stop < num and pairs[stop] < (page + 1) * page_words:
            stop += 1
        last = (pairs[stop - 1] + stored_words - 1) // page_words
        pages += last - max(page - 1, counted)
        counted = last
        if how.can_sample and (looks > 0 or units % _LOOK_EVERY == 0):
            is_there = is_resident(address + page * page_words * 8, scratch.flag)
            looks = _LOOK_ON if is_there else looks - 1
        units += 1
        if is_there:
            _take_rows(batch, words, 0, at, stop)
        else:
            slot, start, size = begun % depth, page * page_words * 8, (last + 1 - page) * page_words * 8
            queues.reads[slot, 0], queues.reads[slot, 1] = at, stop
            queues.reads[slot, 2], queues.reads[slot, 3] = page, size
            if queues.descriptor < 0:
                queue_read(address + start, size)
            else:
                begin_read(queues, slot, start, size, page_words * geo.pages_per_block)
                result[4] += last + 1 - page
            begun += 1
        at = stop
    result[2] = max(result[2], pages)
    return how.can_sample and begun * _COLD_PART > units


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
    reader, waiting = RowReader(verify=True), np.empty(0, np.int64)
    for part in chain(parts, [None]):
        waiting = waiting if part is None else np.concatenate([waiting, part])
        while len(waiting) >= (1 if part is None else size):
            yield reader.stored(snapshot, rows, waiting[:size])
            waiting = waiting[size:]


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
        keys: Iterable[Int64s] = by_key(self._rows, [table])
        if self._since:
            first, stop = np.searchsorted(self.written, [table * MAX_ROWS, (table + 1) * MAX_ROWS])
            keys = [self.written[first:stop]]
        step = max(1, CHUNK_BYTES // self._rows.layouts[table].row_bytes)
        for batch in stored_batches(self._snapshot, self._rows, keys, step):
            yield ChangedRows(batch.keys & ROW_MASK, batch.weights)
