"""Which segments of a damaged row file belong to its last version, and which of their rows are certain to be of it.

Every segment and every block says what it is, and a number is never given to two segments; so they are found wherever
they lie. But freed pages hold segments that were deleted: rows that were superseded, or gone back from, match their
checksums as well. What belongs is on the pages that the tree claims, or that the list of free pages leaves out. That it
is all and nothing else is proven by the record of the log, which has count and hash of the numbers of all segments, or,
if that is damaged, by the number of pages that the meta page counts.

Of a row's entries the newest is the one in the segment with the largest (newest epoch, number): ``row_map.py`` tells
why. It is certain unless there is a newer segment of which a row is not known, as neither the row nor the index can be
read.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, TierstoreError
from ..system.plainfile import read_plain_file
from .anchor import ANCHOR_NAME, Anchor, _newest_slot, boot_id
from .btree import META_READ_BYTES, Meta, parse_meta
from .free_list import PagesInUse, pages_in_use
from .gather import queue_segments
from .indexes import numbers_hash
from .mapped import FileMap
from .remains import Remains
from .row_map import RowMap
from .segments import MAX_BLOCKS, Geometry, index_lengths
from .wreck import (
    BLOCK_DTYPES,
    INDEX_DTYPES,
    BlocksFound,
    IndexesFound,
    Runs,
    find_blocks,
    find_indexes,
    joined,
    selected,
    settled,
)

__all__ = ["Chosen", "Found", "Survivors", "choose_tree", "find_segments", "surviving_rows"]

Int64s = NDArray[np.int64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

_CHUNK_PAGES: Final = 2048
_MAX_ANCHOR_BYTES: Final = 1 << 16


class Chosen(NamedTuple):
    """The tree that is to be saved.

    Attributes:
        pages: bool [pages of the file], those of the tree and its values; None if that cannot be told. If the tree and
            the list of free pages do not agree, other pages are among them.
        agreed: of these, the pages on which they do.
        value_pages: how many pages its values take, as its meta page says.
    """

    pages: Flags | None
    agreed: Flags | None
    value_pages: int


def choose_tree(path: Path, file_map: FileMap, page_bytes: int, store_id: bytes, doubts: list[str]) -> Chosen:
    """Choose a sound tree that holds every commit that returned, or else the newest of which the pages can be told.

    An anchored tree and all later ones hold every commit that returned.

    Args:
        doubts: receives what cannot be proven, in sentences.
    """
    raw = file_map.words.view(np.uint8)
    on_file = [raw[at : at + META_READ_BYTES].tobytes() for at in (0, page_bytes)]
    anchor = _read_anchor(path, store_id, page_bytes)
    anchored = [] if anchor is None else list(anchor.metas)
    if anchor is not None and not _same_boot(anchor) and on_file != anchored:
        on_file = []  # of what was written after the anchor, any part may have been lost
    parsed = [parse_meta(meta) for meta in dict.fromkeys((*anchored, *on_file))]
    metas = [meta for meta in parsed if isinstance(meta, Meta) and meta.page_bytes == page_bytes]
    metas = [meta for meta in metas if anchor is None or meta.txn_id >= anchor.txn_id]
    metas.sort(key=lambda meta: meta.txn_id, reverse=True)
    limit = file_map.file_bytes() // page_bytes
    told = [(meta, pages_in_use(file_map.halves, meta, limit)) for meta in metas]
    told = [each for each in told if each[1].pages is not None]
    if not told:
        doubts.append("Neither a tree of segments nor a list of free pages is sound.")
        return Chosen(None, None, 0)
    if anchor is not None:
        told.sort(key=lambda each: not each[1].is_whole)
    elif not _is_newest(metas, *told[0]):
        doubts.append(
            f"The meta pages of {path.name} or what they lead to are damaged, and no {ANCHOR_NAME} tells which of the "
            "two was the newer: later commits may be missing."
        )
    meta, in_use = told[0]
    return Chosen(in_use.pages, in_use.agreed, meta.main.overflow_pages)


def _is_newest(metas: list[Meta], meta: Meta, in_use: PagesInUse) -> bool:
    """Whether a tree is that of the later of two transactions, whose number its list of free pages has too."""
    is_later = len(metas) == 2 and meta.txn_id == metas[1].txn_id + 1
    return is_later and in_use.list_is_sound


def _same_boot(anchor: Anchor) -> bool:
    current = boot_id()
    return anchor.boot_id == current and any(current)


def _read_anchor(path: Path, store_id: bytes, page_bytes: int) -> Anchor | None:
    """The anchor of this store, if it can be read."""
    try:
        anchor = _newest_slot(read_plain_file(path.with_name(ANCHOR_NAME), _MAX_ANCHOR_BYTES))
    except (OSError, TierstoreError):
        return None
    same = anchor is not None and anchor.store_id == store_id and anchor.page_bytes == page_bytes
    return anchor if same else None


class Found(NamedTuple):
    """What was found in a file.

    Attributes:
        indexes: the segments whose indexes are sound.
        blocks: by layout, blocks of other segments.
        leaves: int64, pages that look like leaves of a tree.
    """

    indexes: IndexesFound
    blocks: list[BlocksFound]
    leaves: Int64s

    @property
    def numbers(self) -> Words:
        """Of all segments of which something was found."""
        return np.unique(np.concatenate([self.indexes.numbers, *(blocks.numbers for blocks in self.blocks)]))

    @property
    def newest(self) -> int:
        """The newest epoch."""
        return int(np.concatenate([self.indexes.newest, *(blocks.newest for blocks in self.blocks)]).max(initial=0))

    def of(self, members: Words) -> "Found":
        """What was found of some segments."""
        blocks = [selected(each, np.isin(each.numbers, members)) for each in self.blocks]
        return self._replace(indexes=selected(self.indexes, np.isin(self.indexes.numbers, members)), blocks=blocks)


def find_segments(
    file_map: FileMap, page_bytes: int, in_use: Flags | None, rows: RowMap, progress: Callable[[int, int], None]
) -> Found:
    """Find segments, and blocks of segments whose indexes are not sound, by what each says of itself.

    Args:
        in_use: bool [pages of the file], where to look for them; None for everywhere.
        rows: knows the layouts.
        progress: told how much of the file was read, in bytes.
    """
    limit = file_map.file_bytes() // page_bytes
    wanted = np.ones(limit, np.bool_) if in_use is None else in_use.copy()
    found = [_looked(file_map, page_bytes, 2, 2, wanted, rows)]
    for start in range(2, limit, _CHUNK_PAGES):
        stop = min(limit, start + _CHUNK_PAGES)
        ahead = np.array([min(limit, stop + _CHUNK_PAGES) - stop], np.int32)
        queue_segments(file_map.address, page_bytes // 8, np.array([stop]), ahead)
        found.append(_looked(file_map, page_bytes, start, stop, wanted, rows))
        progress(stop * page_bytes, limit * page_bytes)
    indexes, blocks, leaves = zip(*found, strict=True)
    orphans = [joined(own) for own in zip(*blocks, strict=True)]
    known = joined(indexes)
    orphans = [selected(own, ~np.isin(own.numbers, known.numbers)) for own in orphans]
    return Found(known, orphans, np.concatenate(leaves))


def _looked(file_map: FileMap, page_bytes: int, start: int, stop: int, wanted: Flags, rows: RowMap) -> Found:
    """What is on pages ``[start, stop)``. Pages of segments whose indexes are sound are wanted no more then."""
    words, limit, length = file_map.words, len(wanted), stop - start
    indexes = IndexesFound(*(np.empty(length, dtype) for dtype in INDEX_DTYPES))
    leaves = np.empty(length, np.int64)
    counts = settled(
        file_map, lambda: find_indexes(words, page_bytes // 8, limit, start, stop, wanted, rows.tables, indexes, leaves)
    )
    indexes, leaves = selected(indexes, slice(counts[0])), leaves[: counts[1]]
    for first, pages in zip(indexes.pages.tolist(), indexes.lengths.tolist(), strict=True):
        wanted[first : first + pages] = False
    blocks = []
    for segments in rows.segments.values():
        room = BlocksFound(*(np.empty(length, dtype) for dtype in BLOCK_DTYPES))
        count = settled(file_map, partial(find_blocks, segments.geo, words, limit, start, stop, wanted, room))
        blocks.append(selected(room, slice(count)))
    return Found(indexes, blocks, leaves)


class Survivors(NamedTuple):
    """Rows of the last version, those of newer segments first.

    Attributes:
        runs: by layout.
        proven: by layout, bool [runs]: no segment of which rows are not known can have newer ones.
        missing: segments of which rows are not known; -1 where nothing proves which segments there are.
    """

    runs: list[Runs]
    proven: list[Flags]
    missing: int


def surviving_rows(
    path: Path, chosen: Chosen, found: Found, remains: Remains, rows: RowMap, doubts: list[str]
) -> Survivors:
    """Where the rows of the last version are, and which of them are certain to be.

    Raises:
        DamagedError: a segment holds what cannot be rows of the tables.
    """
    members, missing = _members(chosen, found, remains), found.numbers[:0]
    if members is None:
        doubts.append(
            "Nothing proves which segments belong to the version. Rows may be older, or gone back from: they are lost, "
            "or taken with --stale-ok."
        )
    else:
        missing, found = np.setdiff1d(members, found.numbers), found.of(members)
    unknown = [(remains.version, number) for number in missing.tolist()]
    all_runs, proven, num_missing = [], [], len(missing)
    for segments, blocks in zip(rows.segments.values(), found.blocks, strict=True):
        shown = selected(blocks, blocks.newest <= remains.version)
        incomplete = _incomplete(shown)
        num_missing += len(incomplete)
        runs = joined([_indexed_runs(path, segments.geo, found.indexes), _block_runs(segments.geo, shown)])
        order = np.lexsort((runs.numbers, runs.newest))[::-1]
        runs = selected(runs, order[runs.newest[order] <= remains.version])
        epoch, number = max(incomplete + unknown, default=(0, 0))
        is_newer = (runs.newest > epoch) | ((runs.newest == epoch) & (runs.numbers >= np.uint64(number)))
        all_runs.append(runs)
        proven.append(is_newer & (members is not None))
    return Survivors(all_runs, proven, -1 if members is None else num_missing)


def _members(chosen: Chosen, found: Found, remains: Remains) -> Words | None:
    """Numbers of the segments of the tree; None where nothing proves that, or that the version is the tree's."""
    numbers, log = found.numbers, remains.log
    if chosen.pages is None or not (remains.is_certain or found.newest <= remains.version):
        return None
    for every in (numbers, np.unique(remains.numbers), np.union1d(numbers, remains.numbers)):
        if log is not None and (len(every), numbers_hash(every)) == (log.num_segments, log.hash):
            return every
    pages = int(found.indexes.lengths.sum()) + remains.value_pages
    is_counted = log is None and pages == chosen.value_pages and len(numbers) == len(found.indexes.numbers)
    return numbers if is_counted else None


def _incomplete(blocks: BlocksFound) -> list[tuple[int, int]]:
    """Newest epoch and number of the segments of these blocks of which a row cannot be read."""
    numbers, which = np.unique(blocks.numbers, return_inverse=True)
    newest, last = np.zeros(len(numbers), np.int64), np.full(len(numbers), MAX_BLOCKS)
    newest[which], last[which[blocks.is_last]] = blocks.newest, blocks.blocks[blocks.is_last]
    is_whole = blocks.sound == blocks.rows
    whole = np.unique(which[is_whole] * MAX_BLOCKS + blocks.blocks[is_whole])
    bad = np.bincount(whole // MAX_BLOCKS, minlength=len(numbers)) != last + 1
    return list(zip(newest[bad].tolist(), numbers[bad].tolist(), strict=True))


def _indexed_runs(path: Path, geo: Geometry, indexes: IndexesFound) -> Runs:
    own = selected(indexes, indexes.layout_ids == geo.layout_id)
    data_pages = own.pages + index_lengths(geo, own.rows, own.is_mixed)
    stops = data_pages + -(-own.rows // geo.rows_per_block) * geo.pages_per_block
    bad = (own.rows > geo.rows_per_segment) | (stops != own.pages + own.lengths)
    if bad.any():
        raise DamagedError(
            f"{path}: segment {own.numbers[int(np.argmax(bad))]} cannot be one of its tables' rows: the manifest is of "
            "other tables; give the store's own with --manifest FILE"
        )
    return Runs(own.numbers, own.newest, own.pages, data_pages, np.zeros_like(own.pages), own.rows)


def _block_runs(geo: Geometry, blocks: BlocksFound) -> Runs:
    firsts = blocks.blocks * geo.rows_per_block
    return Runs(blocks.numbers, blocks.newest, np.zeros_like(blocks.pages), blocks.pages, firsts, blocks.rows)
