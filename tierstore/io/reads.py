"""Reading stored rows: a batch by keys, those changed since a version, or all in the order of another file.

A batch is copied from the file's map: places first, then the copy, until pages turn out not to be in memory. Nothing
says beforehand, at no cost, which pages are warm. So the copy watches the clock: it stops where a group of rows took
longer than memory by a good part of a trip to the device, unless ``mincore`` finds the next row in memory (the thread
was interrupted). Of warm pages (20,000 random rows of 64 float32 out of 8M, in ns a row) the copy takes 55-60, which is
memory itself, the map 7-10, counting pages 2-4, checksums 25-35. Each end of a loop and each look at the clock lets the
rows in flight run dry; hence groups of up to ``MAX_GROUP`` rows. ``HASH_GROUP`` rows are copied, then hashed while
their lines are near. docs/performance.md says what else was tried.

The rest is read in the order of the file, each page once, many at a time, into the buffers of a ring (``uring.py``): by
way of the page cache where memory has room for the file, else past it. Without a ring, ``madvise`` brings pages to the
page cache. Pages that are in memory come through the map. To ask about each (``mincore``) would take a third of the
time; so one in ``_LOOK_EVERY`` is asked about, and the ``_LOOK_ON`` after one that was there. Either way is right: what
a lease shows does not change, and the system writes a page to the device before it reads it directly.
"""

import math
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.hashing import SECRET, keyed_hash
from ..kernels.jit import prefetch_word
from ..kernels.jit import uncounted_helper as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, MAX_ROWS, PAIR_WORDS, ROW_MASK, RowLayout
from ..system.sizes import free_memory_bytes
from .checksum import is_row
from .mapped import clock_ns, copy_words, is_resident, queue_read
from .places import Places, SegmentArrays
from .row_map import RowMap, RowPlaces
from .segments import PREFETCH_ROWS, Geometry, SegmentStatus, damage_error, refused_status, row_seed
from .snapshot import Snapshot
from .uring import BUFFER_WORDS, CACHED, DEPTH, DIRECT, Queues, Rings, begin_read, wait

CHUNK_BYTES: Final = 8 << 20  # changed rows, with their state, that are read at a time
_LIST_STEP: Final = 1 << 20
# Members of an IntEnum, which Python takes 2 us to look up.
_DONE, _OUT_OF_FILE = int(SegmentStatus.DONE), int(SegmentStatus.OUT_OF_FILE)
_BAD_ROW, _UNREADABLE = int(SegmentStatus.BAD_ROW), int(SegmentStatus.UNREADABLE)
_FAILED: Final = -1  # a read of a ring failed, and the device is not to blame: read again, without a ring
_ASK_SECONDS, _PARTS = 1.0, 2  # a file larger than so many times the free memory is read past the page cache
_QUEUE_DEPTH: Final = 512  # reads that ``madvise`` is called for ahead of the copy
_LOOK_EVERY, _LOOK_ON = 16, 64
_COLD_PART: Final = 64  # where one page in so many had to be read, the next batch is expected to be cold
_OF_DEVICE: Final = -5, -61  # EIO, ENODATA
PREFETCH_ENTRIES: Final = 32
MAX_GROUP: Final = 256  # rows between two looks at the clock, at most, while pages are warm
HASH_GROUP: Final = 128  # rows copied before they are hashed: as many as the processor's nearer caches hold twice
GROUP_SLACK_NS, ROW_SLACK_NS = 30_000, 600  # a group of n rows slower than the first + n * the second has waited


class Batch(NamedTuple):
    """Rows of one layout to be read, and room to work in."""

    geo: Geometry
    keys: Int64s
    slots: Int32s
    present: Bools
    weights: Words
    state: Words  # flat views of the arenas
    verify: bool  # compare each row with its checksum
    can_sample: bool  # whether ``is_resident`` says the truth
    offsets: Int64s  # word offset of each row in the map; 0 for a row that was never written
    pairs: Int64s  # word offset of its key, which its checksum follows; 0 likewise
    seeds: Words  # of its checksum
    timespec: Int64s
    flag: NDArray[np.uint8]
    result: Int64s
    """int64 [5], zeroed; receives a SegmentStatus, the position it is about, distinct pages, how many rows were looked
    at before pages were cold, and pages that passed the page cache by."""


class Source(NamedTuple):  # the file that rows are read from
    words: Words
    address: int  # of ``words[0]``
    limit: int  # pages in the file


def new_seen(limit: int, num_pages: int) -> NDArray[np.uint32]:
    """Zeros to count so many pages by: a bit for each in the file, or a hash table of their numbers if that is less."""
    return np.zeros(min((limit + 31) // 32, 1 << (2 * num_pages).bit_length()), np.uint32)


@inline
def count_pages(
    page_words: int, stored_words: int, limit: int, offsets: Int64s, seen: NDArray[np.uint32], secret: int
) -> int:
    """Distinct pages that rows at these ``offsets`` lie on. ``secret``: of ``hashing``."""
    page_shift = 0
    while (1 << page_shift) < page_words:
        page_shift += 1
    in_bits, mask = len(seen) >= (limit + 31) // 32, len(seen) - 1
    count = 0
    for i in range(len(offsets)):
        if offsets[i] == 0:
            continue
        first = offsets[i] >> page_shift
        last = (offsets[i] + stored_words - 1) >> page_shift
        for page in range(first, last + 1):
            at: Any = page >> 5
            entry = np.uint32(1) << np.uint32(page & 31)
            if not in_bits:
                at, entry = np.int64(keyed_hash(page, secret)) & mask, np.uint32(page)
                while seen[at] != 0 and seen[at] != entry:
                    at = (at + 1) & mask
            before = seen[at]
            seen[at] = before | entry
            count += 1 if before != seen[at] else 0
    return count


@inline
def _resolve(batch: Batch, limit: int, places: Places, segments: SegmentArrays, positions: Int64s) -> None:
    geo, offsets, pairs = batch.geo, batch.offsets, batch.pairs
    mask = (1 << geo.place_bits) - 1
    for i in range(len(positions)):
        if i + PREFETCH_ENTRIES < len(positions):
            prefetch_word(places, positions[i + PREFETCH_ENTRIES])
        place = np.int64(places[positions[i]])
        if place == 0:
            offsets[i] = pairs[i] = 0
            continue
        slot = place >> geo.place_bits
        index = place & mask
        # Exact: a quotient below 2**32 lies at least 1 / rows_per_block under the next integer.
        block = np.int64(np.float64(index) / np.float64(geo.rows_per_block))
        page = segments.data_pages[slot] + block * geo.pages_per_block if slot < len(segments.data_pages) else limit
        if page + geo.pages_per_block > limit:
            batch.result[0], batch.result[1] = _OUT_OF_FILE, i
            return
        at = page * geo.page_words
        in_block = index - block * geo.rows_per_block
        offsets[i] = at + geo.first_row + in_block * geo.row_stride
        pairs[i] = at + BLOCK_HEADER_WORDS + in_block * geo.pair_stride
        batch.seeds[i] = row_seed(np.uint64(batch.keys[i]), segments.numbers[slot], np.uint64(index))


@inline
def _take_rows(batch: Batch, words: Words, shift: int, start: int, end: int) -> None:
    """Copy rows ``[start, end)``, which lie ``shift`` words further in the file than in ``words``, then compare them
    with their checksums. A slot is left alone if its row was never written."""
    geo, offsets, pairs = batch.geo, batch.offsets, batch.pairs
    for i in range(start, end):
        if i + PREFETCH_ROWS < len(offsets):
            prefetch_word(words, offsets[i + PREFETCH_ROWS] - shift)
        batch.present[i] = offsets[i] != 0
        if offsets[i] != 0:
            at, slot = offsets[i] - shift, np.int64(batch.slots[i])
            copy_words(batch.weights, slot * geo.weight_words, words, at, geo.weight_words)
            if geo.state_words > 0:
                copy_words(batch.state, slot * geo.state_words, words, at + geo.weight_words, geo.state_words)
    row_words = geo.weight_words + geo.state_words
    for i in range(start, end if batch.verify else start):
        if i + PREFETCH_ROWS < len(pairs):
            prefetch_word(words, pairs[i + PREFETCH_ROWS] - shift)
        at, pair = offsets[i] - shift, pairs[i] - shift
        if offsets[i] != 0 and (
            words[pair] != np.uint64(batch.keys[i]) or not is_row(words, at, row_words, batch.seeds[i], words[pair + 1])
        ):
            batch.result[0], batch.result[1] = _BAD_ROW, i
            return


@kernel
def gather(
    batch: Batch, source: Source, places: Places, segments: SegmentArrays, positions: Int64s,
    seen: NDArray[np.uint32], secret: int, is_cold: bool,
) -> None:  # fmt: skip
    """Copy rows to their slots until their pages turn out to be cold; see ``ColdTier.read``. ``segments``: of the
    layout. ``positions``: int64 [n], of the rows' entries in ``places``. ``is_cold``: pages are not expected in memory:
    only find out where rows lie."""
    geo, result, offsets = batch.geo, batch.result, batch.pairs  # a row of a block of several pages follows its key
    _resolve(batch, source.limit, places, segments, positions)
    if result[0] != 0 or is_cold:
        return
    stored_words = 1 if geo.pages_per_block == 1 else geo.weight_words + geo.state_words + PAIR_WORDS
    result[2] = count_pages(geo.page_words, stored_words, source.limit, offsets, seen, secret)
    num, group, position, has_waited = len(positions), 2, 0, False
    started = clock_ns(batch.timespec)
    while position < num and not has_waited:
        end = min(num, position + group)
        rows, step = end - position, HASH_GROUP if batch.verify else group
        while position < end:
            start, position = position, min(end, position + step)
            _take_rows(batch, source.words, 0, start, position)
            if result[0] != 0:
                return
        now = clock_ns(batch.timespec)
        group = min(group * 2, MAX_GROUP)
        if now - started > GROUP_SLACK_NS + rows * ROW_SLACK_NS and position < num:
            page = offsets[position] // geo.page_words
            there = batch.can_sample and is_resident(source.address + page * geo.page_words * 8, batch.flag)
            has_waited, group = not there, 2
        started = now
    result[3] = position


@kernel
def _read_sorted(batch: Batch, source: Source, queues: Queues, file: int, depth: int) -> bool:
    """Read rows in the order of their places, ``depth`` reads in flight; whether pages were not in memory."""
    geo, result, pairs, num = batch.geo, batch.result, batch.pairs, len(batch.keys)
    page_words = geo.page_words
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
            if result[0] == 0:
                _take_rows(batch, queues.buffers, shift, start, queues.reads[slot, 1])
            ended += 1
            continue
        page, stop, is_there = pairs[at] // page_words, at + 1, False
        while stop < num and pairs[stop] < (page + 1) * page_words:
            stop += 1
        last = (pairs[stop - 1] + stored_words - 1) // page_words
        pages += last - max(page - 1, counted)
        counted = last
        if batch.can_sample and (looks > 0 or units % _LOOK_EVERY == 0):
            is_there = is_resident(source.address + page * page_words * 8, batch.flag)
            looks = _LOOK_ON if is_there else looks - 1
        units += 1
        if is_there:
            _take_rows(batch, source.words, 0, at, stop)
        else:
            slot, start, size = begun % depth, page * page_words * 8, (last + 1 - page) * page_words * 8
            queues.reads[slot, 0], queues.reads[slot, 1] = at, stop
            queues.reads[slot, 2], queues.reads[slot, 3] = page, size
            if queues.descriptor < 0:
                queue_read(source.address + start, size)
            else:
                begin_read(queues, file, slot, start, size, page_words * geo.pages_per_block)
                result[4] += last + 1 - page if file == DIRECT else 0
            begun += 1
        at = stop
    result[2] = max(result[2], pages)
    return batch.can_sample and begun * _COLD_PART > units


class KeyedRows(NamedTuple):
    """Rows of one layout: as they are stored, or to be appended."""

    keys: Int64s  # int64 [n]
    slots: Int32s  # int32 [n], in the arenas; from 0 on for rows that were read
    weights: Words  # the arena, uint64 [slots, words]
    state: Words  # likewise
    epochs: Words  # of rows to be appended: uint64 [1], of all rows, or [n]
    pages: int = 0  # that they were read from


class RowReader:
    """Gathers rows from a file. ``is_cold``: its pages were not in memory the last time. ``is_large``: cold pages are
    read past the page cache, as memory was found at the time ``asked_at``. ``verify``: compare rows with checksums."""

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
        assert present.all(), "a row of the map was not read"
        return KeyedRows(keys, slots, weights, state, np.empty(0, np.uint64), int(result[2]))

    def gather(
        self, snapshot: Snapshot, rows: RowPlaces, layout: RowLayout, keys: Int64s, slots: Int32s, weights: Words,
        state: Words, present: Bools,
    ) -> Int64s:  # fmt: skip
        """Copy rows of one layout as ``ColdTier.read`` does; ``Batch.result``."""
        whole_map, segments = snapshot.file_map, rows.segments[layout]
        if self._can_sample is None:
            self._can_sample = whole_map.tells_residency()
        positions, places = rows.find(layout, keys)
        if not segments.rows:  # as in a new store, whose first batches need not wait for the kernel to be compiled
            present[:] = False
            return np.zeros(5, np.int64)
        geo, arrays, limit, count = segments.geo, segments.arrays, snapshot.limit_pages(), len(keys)
        row_pages = 1 if geo.pages_per_block == 1 else 2 + geo.row_words // geo.page_words
        batch = Batch(
            geo, keys, slots, present, weights.reshape(-1), state.reshape(-1), self._verify, self._can_sample,
            np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint64), np.empty(2, np.int64),
            np.empty(1, np.uint8), np.zeros(5, np.int64),
        )  # fmt: skip
        if (now := time.monotonic()) > self.asked_at + _ASK_SECONDS:
            self.asked_at, self.is_large = now, limit * snapshot.page_bytes > _PARTS * free_memory_bytes()
        has_failed = False
        while True:
            file_map = whole_map.rows  # a map of its own: pages of rows that cannot be read are nobody else's trouble
            guard, source, result = file_map.guard, Source(file_map.words, file_map.address, limit), batch.result
            since = guard.begin()
            result[:] = 0
            seen = new_seen(limit, row_pages * count)
            gather(batch, source, places, arrays, positions, seen, SECRET, self.is_cold)
            if result[0] == _DONE:
                rings = None if has_failed else file_map.locks.rings
                self.is_cold = result[3] < count and self._read_cold(batch, source, rings)
                if has_failed := result[0] == _FAILED:
                    continue
            if result[0] != _OUT_OF_FILE:
                if (refused := guard.refused(since)) is not None:  # what was found on such pages does not count
                    met = refused.meet(batch.pairs * 8, (batch.offsets + geo.row_words) * 8) & (batch.offsets != 0)
                    if met.any():
                        result[0], result[1] = refused_status(refused), np.argmax(met)
                break
            # A place entered while we read may lie in what the file, or the list of segments, grew by meanwhile.
            whole_map = whole_map.reaching(whole_map.locks.size_bytes())
            known, arrays = (limit, len(arrays.numbers)), segments.arrays
            limit = whole_map.file_bytes() // snapshot.page_bytes
            if (limit, len(arrays.numbers)) == known:
                break
        if result[0] != _DONE:
            key = int(keys[result[1]])
            row = f"row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS}"
            raise damage_error(snapshot.path, [(row, int(result[0]))])
        return result

    def _read_cold(self, batch: Batch, source: Source, rings: Rings | None) -> bool:
        """Copy the rows that ``gather`` found and did not copy; whether pages were not in memory. The status may be
        _FAILED, if there are rings."""
        geo, present, result = batch.geo, batch.present, batch.result
        present[result[3] :] = False
        order = result[3] + np.flatnonzero(batch.pairs[result[3] :])
        order = order[np.argsort(batch.pairs[order])]
        ordered = batch._replace(
            keys=batch.keys[order], slots=batch.slots[order], present=np.empty(len(order), np.bool_),
            offsets=batch.offsets[order], pairs=batch.pairs[order], seeds=batch.seeds[order],
        )  # fmt: skip
        depth = min(DEPTH, BUFFER_WORDS // (geo.pages_per_block * geo.page_words))
        ring = rings.take() if rings and depth > 0 else None
        depth = depth if ring else _QUEUE_DEPTH
        queues = ring.queues if ring and ring.queues else Queues(-1, source.words, np.empty((depth, 4), np.int64))
        is_cold = _read_sorted(ordered, source, queues, DIRECT if self.is_large else CACHED, depth)
        if rings and ring:
            rings.put_back(ring, has_failed=result[0] == _FAILED)
        present[order] = True
        result[1] = order[result[1]] if result[0] else 0
        return bool(is_cold)


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
    rows: Int64s  # int64 [n], of a table, ascending
    weights: Words  # uint64 [n, weight words], as they are now


class Changes:
    """Rows written since a version, by the indexes of segments: those that changed, if the current version was made
    from the earlier one, as its lineage says."""

    def __init__(self, snapshot: Snapshot, rows: RowMap, since: int) -> None:
        self._snapshot, self._rows, self._since = snapshot, rows, since

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
