"""Segments: rows appended together, with the list of their keys; building them, and reading their indexes.

A segment is one LMDB value that fills whole pages: first its index, which names its rows, then blocks of rows. A block
fills ``pages_per_block`` pages and names its rows too, so that what is left of a damaged file explains itself.
docs/format.md draws one.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, TruncatedError, UnreadableError
from ..kernels.arrays import Int32s, Int64s, Words
from ..kernels.jit import inline, kernel, prefetch_word
from ..kernels.simd import put
from ..kernels.xxh64 import PRIME_1, PRIME_2, words_hash
from ..layout import BLOCK_HEADER_WORDS, PAGE_HEADER_WORDS, PAIR_WORDS, SEGMENT_HEADER_WORDS, RowLayout
from ..system.files import RESTORE
from .btree import Entries
from .checksum import is_row, mix_key, row_checksum
from .mapped import copy_words, queue_parts, queue_read
from .meta import HEADER_BYTES, SEGMENTS_KEY
from .sigbus import ASK_AGAIN, PageRuns
from .snapshot import Tree

_MAGIC: Final = np.uint64(int.from_bytes(b"tierlogs", "little"))
MIXED: Final = np.uint64(1 << 32)  # beside the number of rows: each has an epoch of its own, listed behind the keys
COUNT_MASK: Final = np.uint64(0xFFFF_FFFF)
# The second word of a block: epoch, 16 bits of a checksum, _LAST_BLOCK, seven bits of the block's number.
_EPOCH_SHIFT: Final = np.uint64(24)
_CHECK_SHIFT: Final = np.uint64(8)
_CHECK_MASK: Final = np.uint64(0xFFFF)
_LAST_BLOCK: Final = np.uint64(0x80)
MAX_BLOCKS: Final = 0x80  # of a segment; their numbers fit below _LAST_BLOCK
_OVERFLOW_FLAG: Final = np.uint64(0x04 << 16)
_FLAGS_AND_COUNT: Final = np.uint64(0xFFFF_FFFF_3FEF_0000)  # of a page header's second word
PREFETCH_ROWS: Final = 8  # rows to be copied are fetched from memory so many before

CHECKSUM, MAGIC, NUMBER, COUNT, NEWEST, OLDEST = range(6)  # places in the index, in words behind LMDB's header
KEYS: Final = SEGMENT_HEADER_WORDS


class SegmentStatus(IntEnum):
    DONE = 0
    OUT_OF_FILE = 1
    BAD_PAGE_HEADER = 2
    BAD_INDEX = 3
    BAD_BLOCK = 4
    BAD_ROW = 5
    BAD_PADDING = 6
    UNREADABLE = 7  # the device refuses a page of it


class Geometry(NamedTuple):  # sizes a kernel needs of a layout
    layout_id: int
    page_words: int
    pages_per_block: int
    rows_per_block: int
    weight_words: int
    state_words: int
    rows_per_segment: int
    place_bits: int  # of a place, for the row's number in its segment
    first_row: int
    row_stride: int
    pair_stride: int
    """Words: from the start of a block to its first row, from row to row, and from key to key. Keys and checksums of a
    block of one page stand before its rows, so that rows begin at whole cache lines if they fill some; in a block of
    several pages each stands before its row, so that both are on the same pages."""

    @property
    def row_words(self) -> int:
        return self.weight_words + self.state_words


def geometry(layout: RowLayout, layout_id: int) -> Geometry:
    row_words, is_one_page = layout.weight_words + layout.state_words, layout.pages_per_block == 1
    return Geometry(
        layout_id=layout_id,
        page_words=layout.page_bytes // 8,
        pages_per_block=layout.pages_per_block,
        rows_per_block=layout.rows_per_block,
        weight_words=layout.weight_words,
        state_words=layout.state_words,
        rows_per_segment=layout.rows_per_segment,
        place_bits=max(1, (layout.rows_per_segment - 1).bit_length()),
        first_row=BLOCK_HEADER_WORDS + PAIR_WORDS * (layout.rows_per_block if is_one_page else 1),
        row_stride=row_words if is_one_page else row_words + PAIR_WORDS,
        pair_stride=PAIR_WORDS if is_one_page else row_words + PAIR_WORDS,
    )


@inline
def index_pages(page_words: int, num_rows: int, is_mixed: bool) -> int:
    """Pages of a segment before its first block."""
    words = PAGE_HEADER_WORDS + SEGMENT_HEADER_WORDS + num_rows * (2 if is_mixed else 1)
    return (words + page_words - 1) // page_words


@inline
def row_seed(key: np.uint64, number: np.uint64, index: np.uint64) -> np.uint64:
    """What a row's checksum begins with: the same bytes as another row, or in another place, have another."""
    return key * PRIME_1 + number * PRIME_2 + index


@inline
def block_word(number: np.uint64, newest: np.uint64, block: int, rows: int, is_last: bool) -> np.uint64:
    """The second word of a block; the first is ``number``, its segment's. ``rows``: in this block. They are in the
    word's checksum alone: it tells places that were never filled from those that were overwritten with zeros."""
    word = (newest << _EPOCH_SHIFT) | np.uint64(block) | (_LAST_BLOCK if is_last else np.uint64(0))
    check = mix_key(number, word | (np.uint64(rows) << _CHECK_SHIFT)) & _CHECK_MASK
    return word | (check << _CHECK_SHIFT)


@inline
def unpack_block_word(word: np.uint64) -> tuple[np.uint64, int, bool]:
    """What it says, right or not: the newest epoch, the block's number in the segment, whether it is the last one."""
    block = np.int64(word & np.uint64(MAX_BLOCKS - 1))
    return word >> _EPOCH_SHIFT, block, (word & _LAST_BLOCK) != np.uint64(0)  # type: ignore[return-value]


@inline
def page_header_status(words: Words, page_words: int, limit: int, page: int, pages: int) -> int:
    """SegmentStatus of the header that LMDB put before a value of so many pages; it frees as many as that says."""
    if page < 2 or page + pages > limit:
        return 1
    at = page * page_words
    expected = _OVERFLOW_FLAG | (np.uint64(pages) << np.uint64(32))
    if words[at] != np.uint64(page) or (words[at + 1] & _FLAGS_AND_COUNT) != expected:
        return 2
    return 0


@inline
def _clear(words: Words, begin: int, end: int) -> None:
    for i in range(begin, end):
        put(words, i, np.uint64(0))


@kernel
def build_segment(
    geo: Geometry, number: int, epochs: Words, keys: Int64s, slots: Int32s, weights: Words, state: Words, image: Words
) -> None:
    """Fill ``image``, the value of segment ``number``, with rows.

    Args:
        epochs: uint64 [1] for all rows, or [rows].
        keys, slots: int64 and int32 [rows], at most ``rows_per_segment``; slots are the rows' in the arenas.
        weights, state: flat views of the arenas. A row may change meanwhile: its checksum is that of the copy.
        image: uint64 [``segment_pages`` * page_words - PAGE_HEADER_WORDS].
    """
    num = len(keys)
    is_mixed = len(epochs) > 1
    first = index_pages(geo.page_words, num, is_mixed) * geo.page_words - PAGE_HEADER_WORDS
    image[MAGIC] = _MAGIC
    image[NUMBER] = np.uint64(number)
    image[COUNT] = np.uint64(num) | (MIXED if is_mixed else np.uint64(0))
    newest = oldest = epochs[0]
    for epoch in epochs:
        newest, oldest = max(newest, epoch), min(oldest, epoch)
    image[NEWEST], image[OLDEST] = newest, oldest
    end = KEYS + num
    for i in range(num):
        image[KEYS + i] = np.uint64(keys[i])
    if is_mixed:
        copy_words(image, end, epochs, 0, num)
        end += num
    image[CHECKSUM] = words_hash(image, MAGIC, end - MAGIC, np.uint64(number))
    _clear(image, end, first)
    row_words = geo.weight_words + geo.state_words
    block_words = geo.pages_per_block * geo.page_words
    used = BLOCK_HEADER_WORDS + geo.rows_per_block * (row_words + 2)
    for block in range((num + geo.rows_per_block - 1) // geo.rows_per_block):
        start = first + block * block_words
        begin = block * geo.rows_per_block
        stop = min(num, begin + geo.rows_per_block)
        image[start] = np.uint64(number)
        image[start + 1] = block_word(image[NUMBER], image[NEWEST], block, stop - begin, stop == num)
        if stop - begin < geo.rows_per_block:
            _clear(image, start + BLOCK_HEADER_WORDS, start + used)
        _clear(image, start + used, start + block_words)
        for i in range(begin, stop):
            if i + PREFETCH_ROWS < num:
                prefetch_word(weights, np.int64(slots[i + PREFETCH_ROWS]) * geo.weight_words)
                prefetch_word(state, np.int64(slots[i + PREFETCH_ROWS]) * geo.state_words)
            slot = np.int64(slots[i])
            at = start + geo.first_row + (i - begin) * geo.row_stride
            copy_words(image, at, weights, slot * geo.weight_words, geo.weight_words)
            if geo.state_words > 0:
                copy_words(image, at + geo.weight_words, state, slot * geo.state_words, geo.state_words)
            pair = start + BLOCK_HEADER_WORDS + (i - begin) * geo.pair_stride
            key = np.uint64(keys[i])
            image[pair] = key
            image[pair + 1] = row_checksum(image, at, row_words, row_seed(key, np.uint64(number), np.uint64(i)))


@inline
def is_sound_row(
    geo: Geometry, words: Words, start: int, i: int, key: np.uint64, number: np.uint64, index: int
) -> bool:
    """Whether row ``i`` of the block at word ``start`` is row ``index`` of segment ``number``, with this key."""
    pair = start + BLOCK_HEADER_WORDS + i * geo.pair_stride
    if words[pair] != key:
        return False
    at, row_words = start + geo.first_row + i * geo.row_stride, geo.weight_words + geo.state_words
    return is_row(words, at, row_words, row_seed(key, number, np.uint64(index)), words[pair + 1])


@inline
def rows_listed(words: Words, at: int) -> tuple[int, bool]:
    """How many rows the index at word ``at`` lists, and whether it lists an epoch of each behind them."""
    count = words[at + COUNT]
    return np.int64(count & COUNT_MASK), (count & MIXED) != np.uint64(0)  # type: ignore[return-value]


@inline
def _index_status(words: Words, page_words: int, limit: int, page: int, pages: int, number: np.uint64) -> int:
    """SegmentStatus of the index of segment ``number``, which the tree says begins at ``page`` and has ``pages``."""
    status = page_header_status(words, page_words, limit, page, pages)
    if status != 0:
        return status
    at = page * page_words + PAGE_HEADER_WORDS
    num, is_mixed = rows_listed(words, at)
    is_one = words[at + MAGIC] == _MAGIC and words[at + NUMBER] == number and num >= 1
    if not is_one or index_pages(page_words, num, is_mixed) >= pages:
        return 3
    length = KEYS - MAGIC + num * (2 if is_mixed else 1)
    if words_hash(words, at + MAGIC, length, number) != words[at + CHECKSUM]:
        return 3
    newest = oldest = words[at + NEWEST]
    if is_mixed:
        newest = oldest = words[at + KEYS + num]
        for i in range(at + KEYS + num + 1, at + KEYS + 2 * num):
            newest, oldest = max(newest, words[i]), min(oldest, words[i])
    is_right = newest == words[at + NEWEST] and oldest == words[at + OLDEST] and is_mixed == (newest != oldest)
    return 0 if is_right else 3


_LOG: Final = logging.getLogger("tierstore")
_PART_SEGMENTS: Final = 1024
_PARTS_AHEAD: Final = 4  # parts that are queued for reading while one is used
_LOGGED_EVERY_SECONDS: Final = 5.0

Stored = NDArray[Any]  # segments of a tree, of dtype ``STORED``, by ascending number

STORED: Final = np.dtype(
    [("number", np.uint64), ("first_page", np.int64), ("pages", np.int64)]
    + [(name, np.int64) for name in ("rows", "newest", "oldest", "first_key")]
)
"""What the tree says of a segment, and then what its index says, 0 where that was not read: rows, the largest and the
least epoch of them, and the key of the first one, from which the layout follows."""


def stored_segments(tree: Tree) -> Stored:
    """The segments of a tree; their indexes are not read. DamagedError: the tree is damaged."""
    entries = tree.walk()
    entries = entries[entries["kind"] == SEGMENTS_KEY]
    if (bad := (entries["size"] + HEADER_BYTES) % tree.page_bytes != 0).any():
        number = entries["number"][int(np.argmax(bad))]
        raise DamagedError(f"{tree.path}: its tree has segment {number}, which does not fill its pages. {RESTORE}")
    return listed_segments(entries, tree.page_bytes)


def listed_segments(entries: Entries, page_bytes: int) -> Stored:
    stored = np.zeros(len(entries), STORED)
    stored["number"], stored["first_page"] = entries["number"], entries["page"]
    stored["pages"] = (entries["size"] + HEADER_BYTES) // page_bytes
    return stored


def byte_ranges(stored: Stored, page_bytes: int) -> tuple[Int64s, Int64s]:
    return stored["first_page"] * page_bytes, (stored["first_page"] + stored["pages"]) * page_bytes


@kernel
def numbers_hash(stored: Stored) -> int:
    """Sum of ``checksum.mix_key`` of the numbers of segments, modulo 2**64."""
    total = np.uint64(0)
    for i in range(len(stored)):
        total += mix_key(np.uint64(0), stored[i]["number"])
    return total  # type: ignore[return-value]


@kernel
def _read(words: Words, address: int, page_words: int, limit: int, stored: Stored, statuses: Int64s) -> None:
    """Check indexes, whose first pages are queued for reading, and fill in what they say where they are sound."""
    for i in range(len(stored)):
        first_page, pages = stored[i]["first_page"], stored[i]["pages"]
        if page_header_status(words, page_words, limit, first_page, pages) == 0:
            num, is_mixed = rows_listed(words, first_page * page_words + PAGE_HEADER_WORDS)
            length = index_pages(page_words, num, is_mixed)
            if 1 < length < pages:
                queue_read(address + (first_page + 1) * page_words * 8, (length - 1) * page_words * 8)
    for i in range(len(stored)):
        first_page, pages = stored[i]["first_page"], stored[i]["pages"]
        statuses[i] = _index_status(words, page_words, limit, first_page, pages, stored[i]["number"])
        if statuses[i] == 0:
            at = first_page * page_words + PAGE_HEADER_WORDS
            stored[i]["rows"] = np.int64(words[at + COUNT] & COUNT_MASK)
            stored[i]["first_key"] = np.int64(words[at + KEYS])
            stored[i]["newest"], stored[i]["oldest"] = np.int64(words[at + NEWEST]), np.int64(words[at + OLDEST])


def read_ahead(count: int, size: int, queue: Callable[[slice], None]) -> Iterator[slice]:
    """Slices of ``count`` things, ``size`` at a time. ``queue`` starts reading one, a few slices ahead, in a thread of
    its own: the system takes about as long to queue pages as we take to look at them."""
    slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if len(slices) < 2:  # a thread would take longer to start
        for each in slices:
            queue(each)
        yield from slices
        return
    with ThreadPoolExecutor(1, "tierstore-read-ahead") as executor:
        queued = deque(executor.submit(queue, each) for each in slices[:_PARTS_AHEAD])
        try:
            for number, each in enumerate(slices):
                queued.extend(executor.submit(queue, later) for later in slices[number + _PARTS_AHEAD :][:1])
                queued.popleft().result()
                yield each
        finally:
            executor.shutdown(cancel_futures=True)


def _in_parts(tree: Tree, stored: Stored) -> Iterator[tuple[Int64s, Int64s]]:
    """Fill in what the indexes of these segments say, where they are what was written, a part at a time as they lie in
    the file; gives positions in ``stored``, and the SegmentStatus of each."""
    file_map, limit, page_bytes = tree.file_map.rows, tree.limit_pages(), tree.page_bytes
    order = np.argsort(stored["first_page"])

    def queue(part: slice) -> None:
        firsts = stored["first_page"][order[part]]
        starts = firsts[firsts < limit] * page_bytes
        queue_parts(file_map.address, starts, starts + page_bytes)

    for part in read_ahead(len(stored), _PART_SEGMENTS, queue):
        at, since = order[part], file_map.guard.begin()
        own, statuses = stored[at], np.zeros(len(at), np.int64)
        _read(file_map.words, file_map.address, page_bytes // 8, limit, own, statuses)
        if (refused := file_map.guard.refused(since)) is not None:
            statuses[refused.meet(*byte_ranges(own, page_bytes))] = refused_status(refused)
        stored[at] = own
        yield at, statuses


def look_at_indexes(tree: Tree, stored: Stored) -> Int64s:
    """Fill in what the indexes say of these segments, where they are what was written; the SegmentStatus of each."""
    statuses = np.zeros(len(stored), np.int64)
    for at, found in _in_parts(tree, stored):
        statuses[at] = found
    return statuses


def read_indexes(tree: Tree, stored: Stored) -> Stored:
    """These segments, with what their indexes say. DamagedError: one is not what was written, or cannot be read."""
    stored = stored.copy()
    _require_sound(tree, stored, look_at_indexes(tree, stored))
    return stored


def read_parts(tree: Tree, stored: Stored) -> Iterator[Stored]:
    """``read_indexes`` a part at a time as they lie in the file, ``stored`` filled in. What takes long is logged."""
    last_logged, done = time.monotonic(), 0
    for at, statuses in _in_parts(tree, stored):
        _require_sound(tree, stored[at], statuses)
        yield stored[at]
        done += len(at)
        if done < len(stored) and time.monotonic() - last_logged > _LOGGED_EVERY_SECONDS:
            last_logged = time.monotonic()
            log = _LOG.info if _LOG.hasHandlers() else _LOG.warning
            log("%s: read the indexes of %d of %d segments, to find its rows", tree.path, done, len(stored))


def _require_sound(tree: Tree, stored: Stored, statuses: Int64s) -> None:
    if statuses.any():
        at = int(np.argmax(statuses > 0))
        raise segment_error(tree, int(stored["number"][at]), int(statuses[at]))


def refused_status(refused: PageRuns) -> SegmentStatus:
    return SegmentStatus.OUT_OF_FILE if refused.is_cut_short else SegmentStatus.UNREADABLE


def segment_error(tree: Tree, number: int, status: int) -> DamagedError:
    return damage_error(tree.path, [(f"segment {number}", status)])


_WORDS: Final[dict[int, str]] = {
    SegmentStatus.OUT_OF_FILE: "lies beyond the end of the file",
    SegmentStatus.UNREADABLE: "cannot be read: the device refuses a page of it",
    SegmentStatus.BAD_ROW: "does not match its checksum",
}


def damage_error(path: Path, found: list[tuple[str, int]], more: str = "") -> DamagedError:
    """What the SegmentStatus of each of these, segments or rows, amounts to; the first one decides on the class."""
    damaged = ((what, _WORDS.get(status, f"is damaged ({SegmentStatus(status).name})")) for what, status in found)
    words = f"{path}: {'; '.join(map(' '.join, damaged))}{more}."
    if found[0][1] == SegmentStatus.UNREADABLE:
        return UnreadableError(f"{words} {ASK_AGAIN} {RESTORE}")
    kind = TruncatedError if found[0][1] == SegmentStatus.OUT_OF_FILE else ChecksumError
    return kind(f"{words} {RESTORE}")
