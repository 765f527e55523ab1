"""Copy rows out of the mapped file: places first, then the copy, with page reads queued ahead where pages are cold.

A cold page read by touching it costs one trip to the device at a time. ``madvise(MADV_WILLNEED)`` starts the read and
returns, so queueing many pages ahead of the copy keeps the device's queue full from one thread; on a warm page the
call is wasted. Nothing says beforehand, at no cost, which pages are warm. So the copy watches the clock: it copies in
groups without asking, and a group slower than memory by a good part of a trip to the device switches to queueing,
unless ``mincore`` finds the next rows in memory (the thread was merely interrupted). The same look ends the queueing.
All of this decides speed only; every row is bounds-checked and verified in either mode.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import uncounted_kernel as inline
from .._jit import uncounted_kernel as kernel
from ..rows import KEY_ROW_BITS, RowLayout
from .checksum import absent_checksum, two_row_checksums
from .directory import TableArrays
from .mapped import clock_ns, copy_words, is_resident, prefetch_word, queue_read

__all__ = ["GatherStatus", "Geometry", "gather", "geometry", "queue_pages"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_PLACE_BITS: Final = 16
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1
_HEADER_WORDS: Final = 4
"""Words before a block's first row: LMDB's page header, then the block's own."""

QUEUE_DEPTH: Final = 512
"""Rows whose pages are queued ahead of the copy."""
SAMPLE_EVERY: Final = 512
SAMPLE_ROWS: Final = 16
"""After every SAMPLE_EVERY rows queued, the next SAMPLE_ROWS are looked at: if all are in memory, queueing ends."""
BLIND_ROWS: Final = 4096
"""Where the kernel does not tell what is in memory, queueing ends after so many rows, to begin anew if need be."""
PREFETCH_ROWS: Final = 8
PREFETCH_ENTRIES: Final = 16
MAX_GROUP: Final = 128
HASH_GROUP: Final = 32
COLD_GROUP: Final = 32
GROUP_SLACK_NS: Final = 30_000
ROW_SLACK_NS: Final = 600
"""A group of n rows slower than GROUP_SLACK_NS + n * ROW_SLACK_NS waited for the device."""


class GatherStatus(IntEnum):
    DONE = 0
    BAD_KEY = 1
    """No such row, or a table of another layout."""
    OUT_OF_FILE = 2
    BAD_ROW = 3


class Geometry(NamedTuple):
    """Sizes a kernel needs of a layout."""

    layout_id: int
    page_words: int
    pages_per_block: int
    rows_per_block: int
    weight_words: int
    state_words: int

    @property
    def row_words(self) -> int:
        return self.weight_words + self.state_words


def geometry(layout: RowLayout, layout_id: int) -> Geometry:
    return Geometry(
        layout_id,
        layout.page_bytes // 8,
        layout.pages_per_block,
        layout.rows_per_block,
        layout.weight_words,
        layout.state_words,
    )


@inline
def _resolve(
    geo: Geometry,
    limit: int,
    keys: Int64s,
    tables: TableArrays,
    pages: NDArray[np.uint32],
    offsets: Int64s,
    result: Int64s,
) -> None:
    """Word offset of each row in the map, 0 for a row of a block that was never written."""
    stored_words = geo.weight_words + geo.state_words + 1
    for i in range(len(keys)):
        table = keys[i] >> _ROW_BITS
        row = keys[i] & _ROW_MASK
        known = table >= 0 and table < len(tables.bases) and tables.layout_ids[table] == geo.layout_id
        if not known or row >= tables.num_rows[table]:
            result[0] = 1
            result[1] = i
            return
        # Exact: a quotient below 2**40 lies at least 1 / rows_per_block under the next integer.
        block = np.int64(np.float64(row) / np.float64(geo.rows_per_block))
        offsets[i] = ((tables.bases[table] + block) << _PLACE_BITS) | (row - block * geo.rows_per_block)
    for i in range(len(keys)):
        if i + PREFETCH_ENTRIES < len(keys):
            prefetch_word(pages, offsets[i + PREFETCH_ENTRIES] >> _PLACE_BITS)
        page = np.int64(pages[offsets[i] >> _PLACE_BITS])
        if page != 0 and page + geo.pages_per_block > limit:
            result[0] = 2
            result[1] = i
            return
        place = _HEADER_WORDS + (offsets[i] & _PLACE_MASK) * stored_words
        offsets[i] = 0 if page == 0 else page * geo.page_words + place


@inline
def _count_pages(page_words: int, stored_words: int, offsets: Int64s, seen: NDArray[np.uint32]) -> int:
    """Distinct pages the rows lie on; ``seen`` is a zeroed hash table, a power of two at least twice as long."""
    mask = len(seen) - 1
    count = 0
    for i in range(len(offsets)):
        if offsets[i] == 0:
            continue
        first = offsets[i] // page_words
        last = (offsets[i] + stored_words - 1) // page_words
        for page in range(first, last + 1):
            at = (page ^ (page >> 17)) & mask
            number = np.uint32(page)
            while seen[at] != 0 and seen[at] != number:
                at = (at + 1) & mask
            if seen[at] == 0:
                seen[at] = number
                count += 1
    return count


@inline
def _is_absent(words: Words, at: int, row_words: int, key: int) -> bool:
    """Whether what is stored here is a row that was never written: zeros under the checksum of nothing."""
    if words[at] != np.uint64(0) or words[at + row_words] != absent_checksum(np.uint64(key)):
        return False
    for j in range(at, at + row_words):  # noqa: SIM110
        if words[j] != np.uint64(0):
            return False
    return True


@inline
def _copy_rows(
    geo: Geometry,
    words: Words,
    start: int,
    end: int,
    offsets: Int64s,
    keys: Int64s,
    slots: Int32s,
    weights: Words,
    state: Words,
    present: NDArray[np.bool_],
) -> None:
    """Copy rows ``[start, end)`` as they are; a row's slot is left alone if it was never written."""
    row_words = geo.weight_words + geo.state_words
    for i in range(start, end):
        if i + PREFETCH_ROWS < len(keys):
            prefetch_word(words, offsets[i + PREFETCH_ROWS])
        offset = offsets[i]
        present[i] = offset != 0 and not _is_absent(words, offset, row_words, keys[i])
        if present[i]:
            slot = np.int64(slots[i])
            copy_words(weights, slot * geo.weight_words, words, offset, geo.weight_words)
            if geo.state_words > 0:
                copy_words(state, slot * geo.state_words, words, offset + geo.weight_words, geo.state_words)


@inline
def _first_bad(
    words: Words,
    row_words: int,
    start: int,
    end: int,
    offsets: Int64s,
    keys: Int64s,
    present: NDArray[np.bool_],
    lanes: Words,
) -> int:
    """-1, or the position of the first present row of ``[start, end)`` that does not match its checksum."""
    for a in range(start, end, 2):
        b = min(a + 1, end - 1)
        if not present[a] and not present[b]:
            continue
        # An absent row is hashed at the other's place: at word 0, the file may be shorter than a row.
        at_a = offsets[a] if present[a] else offsets[b]
        at_b = offsets[b] if present[b] else offsets[a]
        seed_a, seed_b = np.uint64(keys[a]), np.uint64(keys[b])
        checksum_a, checksum_b = two_row_checksums(words, at_a, at_b, row_words, seed_a, seed_b, lanes)
        if present[a] and checksum_a != words[at_a + row_words]:
            return a
        if present[b] and checksum_b != words[at_b + row_words]:
            return b
    return -1


@inline
def _queue_row(address: int, page_words: int, stored_words: int, offset: int) -> None:
    if offset == 0:
        return
    first = offset // page_words
    last = (offset + stored_words - 1) // page_words
    queue_read(address + first * page_words * 8, (last + 1 - first) * page_words * 8)


@inline
def _all_resident(page_words: int, address: int, start: int, offsets: Int64s, flag: NDArray[np.uint8]) -> bool:
    """Whether the next ``SAMPLE_ROWS`` rows are in memory, by their first pages."""
    for i in range(start, min(len(offsets), start + SAMPLE_ROWS)):
        if offsets[i] != 0 and not is_resident(address + offsets[i] // page_words * page_words * 8, flag):
            return False
    return True


@kernel
def gather(
    geo: Geometry,
    words: Words,
    address: int,
    limit: int,
    tables: TableArrays,
    pages: NDArray[np.uint32],
    keys: Int64s,
    slots: Int32s,
    weights: Words,
    state: Words,
    present: NDArray[np.bool_],
    offsets: Int64s,
    seen: NDArray[np.uint32],
    lanes: Words,
    timespec: Int64s,
    flag: NDArray[np.uint8],
    verify: bool,
    cold: bool,
    can_sample: bool,
    result: Int64s,
) -> None:
    """Copy row ``keys[i]`` to ``weights[slots[i]]``, ``state[slots[i]]``; see ``ColdTier.read``.

    Args:
        address: of ``words[0]``.
        limit: pages in the file.
        weights, state: flat views of the arenas.
        offsets: int64 [n], scratch.
        seen: zeroed uint32 scratch, see ``_count_pages``.
        verify: compare each row with its checksum.
        cold: whether to start by queueing page reads.
        can_sample: whether ``is_resident`` says the truth.
        result: int64 [4], zeroed; receives GatherStatus, the position it is about, distinct pages, and 1 if the pages
            turned out cold.
    """
    _resolve(geo, limit, keys, tables, pages, offsets, result)
    if result[0] != 0:
        return
    row_words = geo.weight_words + geo.state_words
    stored_words = row_words + 1
    result[2] = _count_pages(geo.page_words, stored_words, offsets, seen)
    num = len(keys)
    group = 2
    position = 0  # rows before it are copied
    queued = 0  # rows before it are queued
    next_sample = 0 if can_sample else BLIND_ROWS
    started = clock_ns(timespec)
    while position < num:
        queued = max(queued, position)
        while cold and queued < min(num, position + QUEUE_DEPTH):
            if queued >= next_sample:
                next_sample = queued + SAMPLE_EVERY
                cold = can_sample and not _all_resident(geo.page_words, address, queued, offsets, flag)
            if cold:
                _queue_row(address, geo.page_words, stored_words, offsets[queued])
                queued += 1
        end = min(num, position + (COLD_GROUP if cold else group))
        rows, bad = end - position, -1
        while position < end and bad < 0:
            start, position = position, min(end, position + HASH_GROUP)
            _copy_rows(geo, words, start, position, offsets, keys, slots, weights, state, present)
            if verify:
                bad = _first_bad(words, row_words, start, position, offsets, keys, present, lanes)
        if bad >= 0:
            result[0] = 3
            result[1] = bad
            return
        now = clock_ns(timespec)
        waited = now - started > GROUP_SLACK_NS + rows * ROW_SLACK_NS
        started = now
        group = min(group * 2, MAX_GROUP)
        if waited and not cold:
            cold = True
            group = 2
            next_sample = end if can_sample else end + BLIND_ROWS
    result[3] = 1 if cold else 0


@kernel
def queue_pages(address: int, page_bytes: int, pages_each: int, pages: Int64s) -> None:
    """Start reading ``pages_each`` pages from each of ``pages`` on; 0 is skipped."""
    for i in range(len(pages)):
        if pages[i] != 0:
            queue_read(address + pages[i] * page_bytes, pages_each * page_bytes)
