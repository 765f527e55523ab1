"""What of a damaged row file can be saved: the tree to believe, and the sound rows of its last version.

A damaged page of a tree costs what lies below it and nothing else. A tree is *whole* if it lists the segments that the
record of the log counts; without that record, if all its pages are sound and it has as many entries as the meta page
says. A segment whose index is damaged is read block by block: each says what it is, and names its rows.

Of a row's entries the newest is the one in the segment with the largest (newest epoch, number). It is certain unless
there is a newer segment of which a row is not known, as neither the row nor the index can be read.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, FormatError, TierstoreError
from ..kernels.arrays import Bytes, Int32s, Int64s, Words
from ..kernels.jit import kernel
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, PAGE_HEADER_WORDS, ROW_MASK
from ..system.files import read_plain_file
from . import btree, records
from .files import SUPERBLOCK_NAME
from .mapped import FileMap, copy_words
from .meta import META_KEY, META_READ_BYTES, SEGMENTS_KEY, Meta, sound_metas
from .places import Places, Segments, TableArrays
from .row_map import RowMap
from .segments import (
    KEYS,
    MAX_BLOCKS,
    NUMBER,
    Geometry,
    Stored,
    block_word,
    is_sound_row,
    listed_segments,
    look_at_indexes,
    numbers_hash,
    unpack_block_word,
)
from .snapshot import Tree
from .superblock import is_of_this_boot, newest_slot

_MOST_BYTES: Final = 1 << 16  # of a superblock's file
T = TypeVar("T")


def _if_sound(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except DamagedError:
        return None


class Remains(Tree):
    """What one tree leads to. ``stored``: its segments; where that makes the tree whole, their numbers are those that
    their indexes say. ``is_whole``: whether these are certain to be all. ``head``: None if it is missing or damaged.
    ``version``: the current one; 0 if nothing was committed."""

    def __init__(self, path: Path, file_map: FileMap, meta: Meta) -> None:
        super().__init__(path, file_map, meta)
        pages = self.pages()
        walk = btree.new_walk(pages.page_halves, np.zeros((pages.limit >> 6) + 1, np.uint64))
        entries = btree.list_tree(pages, meta.main, walk, tolerant=True)
        own, other = (entries[entries["kind"] == kind] for kind in (SEGMENTS_KEY, META_KEY))
        self._places = dict(zip(other["number"].tolist(), other[["place", "size"]].tolist(), strict=True))
        self.head = _if_sound(lambda: records.read_head(self))
        self.version = self.head.current if self.head is not None else 0
        self.stored = stored = listed_segments(own, meta.page_bytes)
        if (log := _if_sound(lambda: records.read_log(self))) is None:
            are_large = (stored["first_page"] > 0) & (stored["pages"] > 1)
            is_sound = not walk.result[btree.DAMAGED] and bool(are_large.all())
            self.is_whole = is_sound and len(entries) == meta.main.entries
            return
        by_index = stored.copy()  # with the numbers that their indexes say: a key on a leaf may be damaged
        places = stored["first_page"] * (self.page_bytes // 8) + PAGE_HEADER_WORDS + NUMBER
        is_inside = (stored["first_page"] > 0) & (places < file_map.file_bytes() // 8)
        by_index["number"][is_inside] = file_map.words[places[is_inside]]
        self.is_whole = False
        for each in (by_index, stored):
            if (len(np.unique(each["number"])), numbers_hash(each)) == (log.num_segments, log.hash):
                self.is_whole, self.stored = True, each

    def get(self, key: bytes) -> bytes | None:
        """A record, as far as it lies in the file."""
        place, size = self._places.get(int.from_bytes(key[8:], "big"), (0, 0))
        end = min(2 * place + size, self.file_map.file_bytes())
        return self.file_map.words.view(np.uint8)[2 * place : end].tobytes()

    @property
    def store_id(self) -> bytes | None:
        """None if its record is missing or damaged. FormatError if it is of another release."""
        try:
            return records.unpack_store(self.get(records.item_key(records.STORE_ITEM)) or b"")
        except records.OtherFormatError as error:
            raise FormatError(f"{self.path}: {error}") from error
        except (ValueError, struct.error):
            return None

    @property
    def payload(self) -> bytes | None:
        """Of the current version; None if it is damaged."""
        return _if_sound(lambda: records.read_payload(self, records.read_record(self, self.version)))


def choose_tree(path: Path, file_map: FileMap, page_bytes: int, store_id: bytes, doubts: list[str]) -> Remains:
    """The newest whole tree that holds every commit that returned, or else the newest with a record of versions. An
    anchored tree and all later ones hold every commit that returned, and an earlier one of the same versions does.
    ``doubts``: receives what cannot be proven, in sentences. DamagedError: no tree leads to a record of versions.
    FormatError: the file is of another release."""
    raw = file_map.words.view(np.uint8)
    on_file = [raw[at : at + META_READ_BYTES].tobytes() for at in (0, page_bytes)]
    try:
        superblock = newest_slot(read_plain_file(path.with_name(SUPERBLOCK_NAME), _MOST_BYTES))
    except (OSError, TierstoreError):
        superblock = None
    if superblock is not None and (superblock.store_id, superblock.page_bytes) != (store_id, page_bytes):
        superblock = None
    anchored = [] if superblock is None else list(superblock.metas)
    if superblock is not None and not is_of_this_boot(superblock) and on_file != anchored:
        on_file = []  # of what was written after the superblock, any part may have been lost
    metas = [meta for meta in sound_metas(*dict.fromkeys((*anchored, *on_file))) if meta.page_bytes == page_bytes]
    if superblock is not None:
        least = superblock.txn_id
    else:  # the later of two transactions in a row, if both are there to tell
        is_newest_known = len(metas) == 2 and metas[0].txn_id == metas[1].txn_id + 1
        least = metas[0].txn_id if is_newest_known else 1 << 63
    found = [each for each in (Remains(path, file_map, meta) for meta in metas) if each.head is not None]
    if not found:
        raise DamagedError(
            f"{path}: no tree leads to a record of versions, so nothing says which rows are current; restore the "
            "store's directory from a copy."
        )
    newest = found[0]
    found.sort(key=lambda each: (each.txn_id >= least or each.head == newest.head, each.is_whole), reverse=True)
    if newest.txn_id < least:
        doubts.append(
            f"The meta pages of {path.name}, or what they lead to, are damaged, and nothing proves that this tree is "
            "the newest: later commits may be missing."
        )
    if not found[0].is_whole:
        doubts.append(
            "A part of the tree that leads to the segments is damaged. Rows below it are lost, and any other may be "
            "older than one there: it is lost too, or taken with --stale-ok."
        )
    return found[0]


SAVED: Final = 1
LOST: Final = 2
"""In the place of a row in a map: a row that was taken, or of which an entry was found and none was taken."""
_BAD, _SOUND, _PROVEN = range(3)  # a row: damaged; sound; sound, and no segment of which rows are not known is newer

Runs = NDArray[Any]  # rows in their order in a segment, of dtype ``RUN``: all, where its index is sound, or a block's
RUN: Final = np.dtype(
    [("number", np.uint64)]
    + [(name, np.int64) for name in ("newest", "index_page", "data_page", "first", "rows", "sound", "is_last", "trust")]
)
"""Number of the segment, and newest epoch of its rows; the page of the index that has the rows' keys, or 0; where the
first row's block begins, and that row's number in the segment; how many rows there are. Of a block, how many of these
match their checksums, and whether it is the segment's last one. What its sound rows are: ``_SOUND`` or ``_PROVEN``."""


def settled(file_map: FileMap, call: Callable[[], T]) -> T:
    """What a call comes to that reads a file: it is called again while pages are refused, which show zeros then."""
    while True:
        met = file_map.guard.met
        result = call()
        if file_map.guard.refused(met) is None:
            return result


class Survivors(NamedTuple):  # rows of the last version, those of newer segments first
    runs: list[Runs]  # by layout
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
    all_runs, missing = [], len(lost)
    for segments, own in zip(rows.segments.values(), blocks, strict=True):
        shown = own[own["newest"] <= version]
        incomplete = _incomplete(segments.geo, shown)
        missing += len(incomplete)
        runs = np.concatenate([_indexed_runs(remains, segments, known[layout_ids == segments.geo.layout_id]), shown])
        runs = runs[runs["newest"] <= version]
        runs = runs[np.lexsort((runs["number"], runs["newest"]))[::-1]]
        epoch, number = max(incomplete + unknown, default=(0, 0))
        is_newer = (runs["newest"] > epoch) | ((runs["newest"] == epoch) & (runs["number"] >= np.uint64(number)))
        runs["trust"] = np.where(is_newer & remains.is_whole, _PROVEN, _SOUND)
        all_runs.append(runs)
    return Survivors(all_runs, missing if remains.is_whole else -1)


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
            "the manifest is of other tables; put a copy of the store's own in its place"
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
    geo: Geometry, words: Words, limit: int, runs: Runs, keys: Int64s, trust: Bytes, weights: Words, state: Words
) -> int:
    """Copy the sound rows of runs of one layout; returns how many rows there are.

    Args:
        limit: pages in the file.
        keys: int64 [n], receives the rows' keys in their order; -1 where a damaged row leaves only itself to tell.
        trust: uint8 [n], receives what each row is: ``_BAD``, or its run's ``trust``.
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
            is_in_file, index = page + geo.pages_per_block <= limit, runs[run]["first"] + i
            is_sound = is_in_file and is_sound_row(geo, words, at, in_block, key, number, index)
            keys[out] = np.int64(key) if is_listed or is_sound else -1
            trust[out] = runs[run]["trust"] if is_sound else _BAD
            if is_sound:
                row = at + geo.first_row + in_block * geo.row_stride
                copy_words(weights, out * geo.weight_words, words, row, geo.weight_words)
                copy_words(state, out * geo.state_words, words, row + geo.weight_words, geo.state_words)
            out += 1
    return out


@kernel
def choose_rows(
    layout_id: int, tables: TableArrays, places: Places, keys: Int64s, trust: Bytes, stale_ok: bool, taken: Int32s
) -> tuple[int, int]:
    """Choose rows of one layout, given from the newest segment to the oldest: of each the first, if it is sound.
    Returns how many are taken, and how many of these may be, or are, older than the version.

    Args:
        places: by row, as in a ``RowMap``; receives SAVED and LOST.
        keys, trust: as of ``read_rows``.
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
        is_certain = places[position] == 0 and trust[i] == _PROVEN
        if places[position] == 0:
            places[position] = LOST
        if places[position] == LOST and trust[i] != _BAD and (is_certain or stale_ok):
            places[position] = SAVED
            taken[count] = i
            count += 1
            unproven += 0 if is_certain else 1
    return count, unproven
