"""The rows of what a damaged row file still leads to, and which of them are certain to be of its last version.

A segment whose index is damaged is read block by block: each says what it is, and names its rows.

Of a row's entries the newest is the one in the segment with the largest (newest epoch, number): ``row_map.py`` tells
why. It is certain unless there is a newer segment of which a row is not known, as neither the row nor the index can be
read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.jit import inline, kernel
from ..rows import BLOCK_HEADER_WORDS, KEY_ROW_BITS, PAGE_HEADER_WORDS
from .checksum import row_checksum
from .indexes import Indexes, StoredSegments, look_at_indexes
from .mapped import FileMap, copy_words
from .row_map import Places, RowMap, TableArrays
from .segments import KEYS, MAX_BLOCKS, Geometry, block_word, row_seed, unpack_block_word
from .slots import Segments
from .sound_tree import Remains

T = TypeVar("T", bound=tuple[Any, ...])
R = TypeVar("R")

_ROW_BITS: Final = KEY_ROW_BITS
_ROW_MASK: Final = (1 << KEY_ROW_BITS) - 1

SAVED: Final = 1
LOST: Final = 2
"""In the place of a row in a map: a row that was taken, or of which an entry was found and none was taken."""


def _joined(parts: Sequence[T]) -> T:
    """Columns one behind the other."""
    return parts[0].__class__(*map(np.concatenate, zip(*parts, strict=True)))


def selected(columns: T, which: "Int64s | Bools | slice") -> T:
    return columns.__class__(*(column[which] for column in columns))


def settled(file_map: FileMap, call: Callable[[], R]) -> R:
    """What a call comes to that reads a file: it is called again while pages are refused, which show zeros then."""
    while True:
        met = file_map.guard.met
        result = call()
        if file_map.guard.is_clean(met):
            return result


class Survivors(NamedTuple):
    """Rows of the last version, those of newer segments first.

    Attributes:
        runs: by layout.
        proven: by layout, bool [runs]: no segment of which rows are not known can have newer ones.
        missing: segments of which rows are not known; -1 where a part of the tree is.
    """

    runs: "list[Runs]"
    proven: list[Bools]
    missing: int


def surviving_rows(remains: Remains, rows: RowMap) -> Survivors:
    """Where the rows of the last version are, and which of them are certain to be.

    Raises:
        DamagedError: a segment holds what cannot be rows of the tables.
    """
    stored, version = remains.stored, remains.version
    indexes, statuses = look_at_indexes(remains.tree, stored)
    known, bad = indexes.chosen(statuses == 0), stored.chosen(statuses != 0)
    layout_ids = _layout_ids(remains, rows, known)
    blocks = [_find_blocks(remains.tree.file_map, segments.geo, bad) for segments in rows.segments.values()]
    lost = np.setdiff1d(bad.numbers, np.concatenate([bad.numbers[:0], *(each.numbers for each in blocks)]))
    unknown = [(version, number) for number in lost.tolist()]
    all_runs, proven, missing = [], [], len(lost)
    for segments, own in zip(rows.segments.values(), blocks, strict=True):
        shown = selected(own, own.newest <= version)
        incomplete = _incomplete(shown)
        missing += len(incomplete)
        listed = known.chosen(layout_ids == segments.geo.layout_id)
        runs = _joined([_indexed_runs(remains, segments, listed), _block_runs(segments.geo, shown)])
        order = np.lexsort((runs.numbers, runs.newest))[::-1]
        runs = selected(runs, order[runs.newest[order] <= version])
        epoch, number = max(incomplete + unknown, default=(0, 0))
        is_newer = (runs.newest > epoch) | ((runs.newest == epoch) & (runs.numbers >= np.uint64(number)))
        all_runs.append(runs)
        proven.append(is_newer & remains.is_whole)
    return Survivors(all_runs, proven, missing if remains.is_whole else -1)


def _layout_ids(remains: Remains, rows: RowMap, indexes: Indexes) -> Int64s:
    """Of segments, by the first row of a table that is known; -1 if there is none."""
    found, words = rows.layout_ids(indexes), remains.tree.file_map.words
    for i in np.flatnonzero(found < 0).tolist():
        at = int(indexes.stored.first_pages[i]) * remains.tree.page_bytes // 8 + PAGE_HEADER_WORDS + KEYS
        tables = words[at : at + int(indexes.rows[i])] >> np.uint64(_ROW_BITS)
        ids = rows.tables.layout_ids[tables[tables < len(rows.tables.layout_ids)].astype(np.int64)]
        found[i] = next(iter(ids[ids >= 0].tolist()), -1)
    return found


class _Blocks(NamedTuple):
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
    is_last: Bools


def _find_blocks(file_map: FileMap, geo: Geometry, stored: StoredSegments) -> _Blocks:
    """The blocks of a layout in these segments, of which each page is looked at."""
    numbers = np.repeat(stored.numbers, stored.pages)
    nth = np.arange(len(numbers)) - np.repeat(np.cumsum(stored.pages) - stored.pages, stored.pages)
    pages = np.repeat(stored.first_pages, stored.pages) + nth
    limit = file_map.file_bytes() // (8 * geo.page_words)
    inside = (pages >= 2) & (pages + geo.pages_per_block <= limit)
    numbers, pages = numbers[inside], pages[inside]
    dtypes: tuple[Any, ...] = (np.uint64, np.int64, np.int64, np.int64, np.int64, np.int64, np.bool_)
    room = _Blocks(*(np.zeros(len(pages), dtype) for dtype in dtypes))
    count = settled(file_map, lambda: _list_blocks(geo, file_map.words, numbers, pages, room))
    return selected(room, slice(count))


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
def _list_blocks(geo: Geometry, words: Words, numbers: Words, pages: Int64s, found: _Blocks) -> int:
    """List the blocks of a layout that begin on these pages and are of these segments; returns how many."""
    out = 0
    for p in range(len(pages)):
        at = pages[p] * geo.page_words
        newest, block, is_last = unpack_block_word(words[at + 1])
        rows = geo.rows_per_block
        pair = at + BLOCK_HEADER_WORDS + (rows - 1) * geo.pair_stride
        while is_last and rows > 0 and words[pair] == np.uint64(0) and words[pair + 1] == np.uint64(0):
            rows -= 1
            pair -= geo.pair_stride
        if words[at] != numbers[p] or block_word(words[at], newest, block, rows, is_last) != words[at + 1]:
            continue
        sound = 0
        for i in range(rows):
            key = words[at + BLOCK_HEADER_WORDS + i * geo.pair_stride]
            sound += 1 if _is_sound(geo, words, at, i, key, words[at], block * geo.rows_per_block + i) else 0
        if sound > 0:
            found.numbers[out] = words[at]
            found.pages[out] = pages[p]
            found.newest[out] = np.int64(newest)
            found.blocks[out] = block
            found.rows[out] = rows
            found.sound[out] = sound
            found.is_last[out] = is_last
            out += 1
    return out


def _incomplete(blocks: _Blocks) -> list[tuple[int, int]]:
    """Newest epoch and number of the segments of these blocks of which a row cannot be read."""
    numbers, which = np.unique(blocks.numbers, return_inverse=True)
    newest, last = np.zeros(len(numbers), np.int64), np.full(len(numbers), MAX_BLOCKS)
    newest[which], last[which[blocks.is_last]] = blocks.newest, blocks.blocks[blocks.is_last]
    is_whole = blocks.sound == blocks.rows
    whole = np.unique(which[is_whole] * MAX_BLOCKS + blocks.blocks[is_whole])
    bad = np.bincount(whole // MAX_BLOCKS, minlength=len(numbers)) != last + 1
    return list(zip(newest[bad].tolist(), numbers[bad].tolist(), strict=True))


def _indexed_runs(remains: Remains, segments: Segments, indexes: Indexes) -> "Runs":
    stored, fits = indexes.stored, segments.fits(indexes)
    if not fits.all():
        raise DamagedError(
            f"{remains.tree.path}: segment {stored.numbers[int(np.argmin(fits))]} cannot be one of its tables' rows: "
            "the manifest is of other tables; give the store's own with --manifest FILE"
        )
    firsts = np.zeros_like(indexes.rows)
    return Runs(stored.numbers, indexes.newest, stored.first_pages, segments.data_pages(indexes), firsts, indexes.rows)


def _block_runs(geo: Geometry, blocks: _Blocks) -> "Runs":
    firsts = blocks.blocks * geo.rows_per_block
    return Runs(blocks.numbers, blocks.newest, np.zeros_like(blocks.pages), blocks.pages, firsts, blocks.rows)


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
    geo: Geometry, words: Words, limit: int, runs: Runs, keys: Int64s, sound: Bools, weights: Words, state: Words
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
    layout_id: int, tables: TableArrays, places: Places, keys: Int64s, sound: Bools, proven: Bools, stale_ok: bool,
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
