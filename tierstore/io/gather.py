"""Copy rows out of the mapped file: places first, then the copy, with page reads queued ahead where pages are cold.

A cold page read by touching it costs one trip to the device at a time. ``madvise(MADV_WILLNEED)`` starts the read and
returns, so queueing many pages ahead of the copy keeps the device's queue full from one thread; on a warm page the
call is wasted. Nothing says beforehand which pages are warm, so the copy watches the clock: it copies optimistically in
groups, and a group slower than memory by about one trip to the device switches to queueing, for as long as steps
take longer than they would on warm pages. The clock decides speed only; every row is bounds-checked and verified in
either mode.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._jit import inline, kernel
from ..rows import KEY_ROW_BITS, RowLayout
from .checksum import absent_checksum, row_checksum
from .directory import TableArrays
from .mapped import clock_ns, prefetch_word, queue_read

__all__ = ["GatherStatus", "Geometry", "gather", "geometry", "measure_queue_ns", "queue_pages"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_HEADER_WORDS: Final = 4
"""Words before a block's first row: LMDB's page header, then the block's own."""
_LINE_WORDS: Final = 8

QUEUE_DEPTH: Final = 512
"""Rows whose pages are queued ahead of the copy."""
QUEUE_STEP: Final = 32
WARM_STEPS: Final = 8
"""So many quick steps in a row end the queueing."""
PREFETCH_ROWS: Final = 8
MAX_GROUP: Final = 64
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
        key = keys[i]
        table = key >> _ROW_BITS
        row = key & _ROW_MASK
        if (
            table < 0
            or table >= len(tables.bases)
            or tables.layout_ids[table] != geo.layout_id
            or row >= tables.num_rows[table]
        ):
            result[0] = 1
        if result[0] != 0:
            result[1] = i
            return
        block = row // geo.rows_per_block
        page = np.int64(pages[tables.bases[table] + block])
        if page + geo.pages_per_block > limit:
            result[0] = 2
            result[1] = i
            return
        place = _HEADER_WORDS + (row - block * geo.rows_per_block) * stored_words
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
def _copy_rows(
    geo: Geometry,
    words: Words,
    verify: bool,
    start: int,
    end: int,
    offsets: Int64s,
    keys: Int64s,
    slots: Int32s,
    weights: Words,
    state: Words,
    present: NDArray[np.bool_],
) -> int:
    """Copy rows ``[start, end)``; -1, or the position of a row that fails its checksum."""
    row_words = geo.weight_words + geo.state_words
    num = len(keys)
    for i in range(start, end):
        if i + PREFETCH_ROWS < num:
            ahead = offsets[i + PREFETCH_ROWS]
            for line in range(ahead, ahead + row_words + 1, _LINE_WORDS):
                prefetch_word(words, line)
        offset = offsets[i]
        if offset == 0:
            present[i] = False
            continue
        row = words[offset : offset + row_words]
        stored = words[offset + row_words]
        seed = np.uint64(keys[i])
        if stored == absent_checksum(seed):
            if verify:
                for j in range(row_words):
                    if row[j] != np.uint64(0):
                        return i
            present[i] = False
            continue
        if verify and row_checksum(row, row_words, seed) != stored:
            return i
        slot = slots[i]
        weights[slot, :] = row[: geo.weight_words]
        state[slot, :] = row[geo.weight_words :]
        present[i] = True
    return -1


@inline
def _queue_row(address: int, page_words: int, stored_words: int, offset: int) -> None:
    first = offset // page_words
    last = (offset + stored_words - 1) // page_words
    queue_read(address + first * page_words * 8, (last + 1 - first) * page_words * 8)


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
    verify: bool,
    cold: bool,
    warm_step_ns: int,
    result: Int64s,
) -> None:
    """Copy row ``keys[i]`` to ``weights[slots[i]]``, ``state[slots[i]]``; see ``ColdTier.read``.

    Args:
        address: of ``words[0]``.
        limit: pages in the file.
        offsets: int64 [n], scratch.
        seen: zeroed uint32 scratch, see ``_count_pages``.
        verify: compare each row with its checksum.
        cold: whether to start by queueing page reads.
        warm_step_ns: a queueing step that takes less found its pages in memory.
        result: int64 [4], zeroed; receives GatherStatus, the position it is about, distinct pages, and 1 if the pages
            turned out cold.
    """
    _resolve(geo, limit, keys, tables, pages, offsets, result)
    if result[0] != 0:
        return
    stored_words = geo.weight_words + geo.state_words + 1
    result[2] = _count_pages(geo.page_words, stored_words, offsets, seen)
    num = len(keys)
    timespec = np.zeros(2, np.int64)
    position = 0
    queued = 0
    group = 4
    quick_steps = 0
    started = clock_ns(timespec)
    while position < num:
        if cold:
            queue_end = min(num, max(queued, position) + QUEUE_STEP)
            queued = max(queued, position)
            while queued < queue_end:
                if offsets[queued] != 0:
                    _queue_row(address, geo.page_words, stored_words, offsets[queued])
                queued += 1
            if queued < num and queued - position < QUEUE_DEPTH:
                continue
            end = min(num, position + QUEUE_STEP)
        else:
            end = min(num, position + group)
        bad = _copy_rows(geo, words, verify, position, end, offsets, keys, slots, weights, state, present)
        if bad >= 0:
            result[0] = 3
            result[1] = bad
            return
        now = clock_ns(timespec)
        elapsed = now - started
        started = now
        if cold:
            quick_steps = quick_steps + 1 if elapsed < warm_step_ns else 0
            if quick_steps >= WARM_STEPS:
                cold = False
                group = 4
        elif elapsed > GROUP_SLACK_NS + (end - position) * ROW_SLACK_NS:
            cold = True
            quick_steps = 0
        else:
            group = min(group * 2, MAX_GROUP)
        position = end
    result[3] = 1 if cold else 0


@kernel
def queue_pages(address: int, page_bytes: int, pages_each: int, pages: Int64s) -> None:
    """Start reading ``pages_each`` pages from each of ``pages`` on; 0 is skipped."""
    for i in range(len(pages)):
        if pages[i] != 0:
            queue_read(address + pages[i] * page_bytes, pages_each * page_bytes)


@kernel
def measure_queue_ns(address: int, page_bytes: int, repeats: int) -> int:
    """Nanoseconds that queueing a page costs when it is in memory already (the file's first page is)."""
    timespec = np.zeros(2, np.int64)
    queue_read(address, page_bytes)
    started = clock_ns(timespec)
    for _ in range(repeats):
        queue_read(address, page_bytes)
    return (clock_ns(timespec) - started) // repeats
