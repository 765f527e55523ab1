"""Kernels that take what is sound out of a damaged row file: records on leaves, indexes and blocks by themselves, rows.

Nothing here trusts the order of keys: one changed bit in a key would make all that follows it look wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..kernels.jit import inline, kernel
from ..rows import BLOCK_HEADER_WORDS, KEY_ROW_BITS, PAGE_HEADER_WORDS
from .btree import Entries, Halves, count_keys, half, key_word, number
from .checksum import row_checksum
from .mapped import FileMap, copy_words
from .row_map import Places, TableArrays
from .segments import (
    COUNT,
    COUNT_MASK,
    KEYS,
    MIXED,
    NEWEST,
    NUMBER,
    Geometry,
    block_word,
    check_index,
    index_pages,
    row_seed,
    unpack_block_word,
)

__all__ = [
    "BLOCK_DTYPES",
    "INDEX_DTYPES",
    "LOST",
    "BlocksFound",
    "IndexesFound",
    "Runs",
    "choose_rows",
    "find_blocks",
    "find_indexes",
    "joined",
    "list_nodes",
    "read_rows",
    "selected",
    "settled",
]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

T = TypeVar("T", bound=tuple[Any, ...])
R = TypeVar("R")

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1
_LEAF: Final = 0x02
_LASTING: Final = np.uint64(0x3FEF)
"""The flags of a page that mean something on disk."""
_BIG_DATA: Final = 0x01
_KEY_BYTES: Final = 16
_NODE_BYTES: Final = 8

SAVED: Final = 1
LOST: Final = 2
"""In the place of a row in a map: a row that was taken, or of which an entry was found and none was taken."""


def joined(parts: Sequence[T]) -> T:
    """Columns one behind the other."""
    return parts[0].__class__(*map(np.concatenate, zip(*parts, strict=True)))


def selected(columns: T, which: "Int64s | Flags | slice") -> T:
    return columns.__class__(*(column[which] for column in columns))


def settled(file_map: FileMap, call: Callable[[], R]) -> R:
    """What a call comes to that reads a file: it is called again while pages are refused, which show zeros then."""
    while True:
        met = file_map.guard.met
        result = call()
        if file_map.guard.is_clean(met):
            return result


@inline
def _int(word: np.uint64) -> int:
    return np.int64(word)  # type: ignore[return-value]


@kernel
def list_nodes(
    halves: Halves, page_halves: int, limit: int, leaves: Int64s, start: int, entries: Entries
) -> tuple[int, int]:
    """List the nodes of leaves that look as they should, from the leaf at place ``start`` on, as long as there is room.

    An entry's ``pages`` is the page of its value, or minus the byte at which a small value lies on the leaf.

    Returns:
        The place to go on at, and how many there are.
    """
    out = 0
    while start < len(leaves) and out + page_halves // (_KEY_BYTES // 2) < len(entries.pages):
        page = leaves[start]
        for index in range(count_keys(halves, page_halves, limit, page, _LEAF)):
            offset = half(halves, page * page_halves + 8 + index)
            if offset & 1 or offset + _NODE_BYTES + _KEY_BYTES > page_halves * 2:
                continue
            node = page * page_halves + (offset >> 1)
            size = half(halves, node) | (half(halves, node + 1) << 16)
            flags = halves[node + 2]
            room = 8 if flags == _BIG_DATA else size
            is_sound = halves[node + 3] == _KEY_BYTES and flags <= _BIG_DATA
            if not is_sound or offset + _NODE_BYTES + _KEY_BYTES + room > page_halves * 2:
                continue
            place = -2 * (node + (_NODE_BYTES + _KEY_BYTES) // 2)
            if flags == _BIG_DATA:
                place = number(halves, node + 12)
                if place < 2:
                    continue
            entries.kinds[out] = key_word(halves, node + 4)
            entries.numbers[out] = key_word(halves, node + 8)
            entries.pages[out] = place
            entries.sizes[out] = size
            out += 1
        start += 1
    return start, out


class IndexesFound(NamedTuple):
    """Segments whose indexes are sound."""

    numbers: Words
    pages: Int64s
    """Where each begins."""
    lengths: Int64s
    """How many pages each has."""
    rows: Int64s
    newest: Int64s
    is_mixed: Flags
    layout_ids: Int64s
    """By the first row of a table that is known; -1 if there is none."""


INDEX_DTYPES: Final[tuple[Any, ...]] = (np.uint64, np.int64, np.int64, np.int64, np.int64, np.bool_, np.int64)


@kernel
def find_indexes(
    words: Words,
    page_words: int,
    limit: int,
    start: int,
    stop: int,
    wanted: Flags,
    tables: TableArrays,
    found: IndexesFound,
    leaves: Int64s,
) -> tuple[int, int]:
    """List the sound indexes on wanted pages ``[start, stop)``, and all pages there that look like leaves of a tree.

    Args:
        limit: pages in the file. Of a segment the index must lie in it.
        found, leaves: receive one a page at most.

    Returns:
        How many indexes, and how many leaves.
    """
    out, num_leaves = 0, 0
    for page in range(start, stop):
        header = page * page_words
        if words[header] != np.uint64(page):
            continue
        if (words[header + 1] >> np.uint64(16)) & _LASTING == np.uint64(_LEAF):
            leaves[num_leaves] = page
            num_leaves += 1
        at = header + PAGE_HEADER_WORDS
        length, num = _int(words[header + 1] >> np.uint64(32)), _int(words[at + COUNT] & COUNT_MASK)
        is_mixed = (words[at + COUNT] & MIXED) != np.uint64(0)
        if not wanted[page] or page + index_pages(page_words, num, is_mixed) > limit:
            continue
        if check_index(words, page_words, page + length, page, length, words[at + NUMBER]) == 0:
            found.numbers[out] = words[at + NUMBER]
            found.pages[out] = page
            found.lengths[out] = length
            found.rows[out] = num
            found.newest[out] = np.int64(words[at + NEWEST])
            found.is_mixed[out] = is_mixed
            found.layout_ids[out] = -1
            for i in range(num):
                table = _int(words[at + KEYS + i]) >> _ROW_BITS
                if found.layout_ids[out] < 0 and 0 <= table < len(tables.layout_ids):
                    found.layout_ids[out] = tables.layout_ids[table]
            out += 1
    return out, num_leaves


class BlocksFound(NamedTuple):
    """Blocks that were found by what they say of themselves, in which a row at least is sound."""

    numbers: Words
    """Of their segments."""
    pages: Int64s
    newest: Int64s
    blocks: Int64s
    """Their numbers in their segments."""
    rows: Int64s
    sound: Int64s
    """How many rows match their checksums."""
    is_last: Flags


BLOCK_DTYPES: Final[tuple[Any, ...]] = (np.uint64, np.int64, np.int64, np.int64, np.int64, np.int64, np.bool_)


@inline
def _is_sound(geo: Geometry, words: Words, start: int, i: int, key: np.uint64, number: np.uint64, index: int) -> bool:
    """Whether row ``i`` of the block at word ``start`` has this key, and is number ``index`` of its segment."""
    pair = start + BLOCK_HEADER_WORDS + i * geo.pair_stride
    if words[pair] != key:
        return False
    at, row_words = start + geo.first_row + i * geo.row_stride, geo.weight_words + geo.state_words
    checksum = row_checksum(words, at, row_words, row_seed(key, number, np.uint64(index)))
    return words[pair + 1] == checksum  # type: ignore[no-any-return]


@kernel
def find_blocks(
    geo: Geometry, words: Words, limit: int, start: int, stop: int, wanted: Flags, found: BlocksFound
) -> int:
    """List the blocks of a layout on wanted pages ``[start, stop)``; returns how many."""
    out = 0
    for page in range(start, min(stop, limit - geo.pages_per_block + 1)):
        if not wanted[page]:
            continue
        at = page * geo.page_words
        newest, block, is_last = unpack_block_word(words[at + 1])
        rows = geo.rows_per_block
        pair = at + BLOCK_HEADER_WORDS + (rows - 1) * geo.pair_stride
        while is_last and rows > 0 and words[pair] == np.uint64(0) and words[pair + 1] == np.uint64(0):
            rows -= 1
            pair -= geo.pair_stride
        if block_word(words[at], newest, block, rows, is_last) != words[at + 1]:
            continue
        sound = 0
        for i in range(rows):
            key = words[at + BLOCK_HEADER_WORDS + i * geo.pair_stride]
            sound += 1 if _is_sound(geo, words, at, i, key, words[at], block * geo.rows_per_block + i) else 0
        if sound > 0:
            found.numbers[out] = words[at]
            found.pages[out] = page
            found.newest[out] = np.int64(newest)
            found.blocks[out] = block
            found.rows[out] = rows
            found.sound[out] = sound
            found.is_last[out] = is_last
            out += 1
    return out


class Runs(NamedTuple):
    """Rows that lie in their order in a segment: all of a segment whose index is sound, or those of a block."""

    numbers: Words
    newest: Int64s
    """Number of the segment, and newest epoch of its rows."""
    index_pages: Int64s
    """Where the index is that has the rows' keys, from its beginning on; 0 if they are only beside the rows."""
    data_pages: Int64s
    """Where the first row's block begins."""
    firsts: Int64s
    """The first row's number in the segment."""
    rows: Int64s


@kernel
def read_rows(
    geo: Geometry, words: Words, limit: int, runs: Runs, keys: Int64s, sound: Flags, weights: Words, state: Words
) -> int:
    """Copy the sound rows of runs of one layout.

    Args:
        limit: pages in the file.
        keys: int64 [n], receives the rows' keys in their order; -1 where a damaged row leaves only itself to tell.
        sound: bool [n], receives which of them match their checksums.
        weights, state: flat, receive the sound rows at their positions in ``keys``.

    Returns:
        How many rows there are.
    """
    out = 0
    for run in range(len(runs.rows)):
        is_listed = runs.index_pages[run] > 0
        listed = runs.index_pages[run] * geo.page_words + PAGE_HEADER_WORDS + KEYS
        for i in range(runs.rows[run]):
            block = i // geo.rows_per_block
            page, in_block = runs.data_pages[run] + block * geo.pages_per_block, i - block * geo.rows_per_block
            at = page * geo.page_words
            key = words[listed + i] if is_listed else words[at + BLOCK_HEADER_WORDS + in_block * geo.pair_stride]
            is_in_file = page + geo.pages_per_block <= limit
            index = runs.firsts[run] + i
            sound[out] = is_in_file and _is_sound(geo, words, at, in_block, key, runs.numbers[run], index)
            keys[out] = np.int64(key) if is_listed or sound[out] else -1
            if sound[out]:
                row = at + geo.first_row + in_block * geo.row_stride
                copy_words(weights, out * geo.weight_words, words, row, geo.weight_words)
                copy_words(state, out * geo.state_words, words, row + geo.weight_words, geo.state_words)
            out += 1
    return out


@kernel
def choose_rows(
    layout_id: int, tables: TableArrays, places: Places, keys: Int64s, sound: Flags, proven: Flags, stale_ok: bool,
    taken: Int32s,
) -> tuple[int, int]:  # fmt: skip
    """Choose rows of one layout, given from the newest segment to the oldest: of each the first, if it is sound.

    Args:
        places: by row, as in a ``RowMap``; receives SAVED and LOST.
        proven: bool [rows], no row of a newer segment can be missing.
        stale_ok: also take what is not proven, and older ones in place of damaged ones.
        taken: int32 [rows], receives the positions of the rows that are taken.

    Returns:
        How many are taken, and how many of these may be, or are, older than the version.
    """
    count, unproven = 0, 0
    for i in range(len(keys)):
        table = keys[i] >> _ROW_BITS
        row = keys[i] & _ROW_MASK
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
