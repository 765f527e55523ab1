"""Which blocks of a damaged row file are those of its last version, and what proves it.

The tree may be broken anywhere, and freed pages hold older versions of blocks, whose rows match their checksums as well
as the newest ones do. So a block counts only with proof that it is the newest one of its version. What was found of a
table must agree, in number and hash, with what the commit recorded of it, be it found through the tree or by the
headers of the pages that the list of free pages leaves out. Where it does not agree, a block still counts if the tree
leads to it, its own header says the same, the tree goes on behind that entry, where a newer one would be, and no page
holds a newer one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, TierstoreError
from ..plainfile import read_plain_file
from ..rows import KEY_ROW_BITS
from .anchor import ANCHOR_NAME, Anchor, _newest_slot, boot_id
from .btree import META_KEY, META_READ_BYTES, Entries, Meta, WalkStatus, new_entries, parse_meta
from .directory import tally
from .free_list import check_page_use, free_pages
from .mapped import FileMap
from .records import CommitRecord, TableTotals
from .scrub import TableShapes
from .wreck import GAP, Walk, list_sound, new_walk, read_headers, scan_blocks

__all__ = ["Survivors", "choose_tree", "list_entries", "old_records", "surviving_blocks"]

Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

_CHUNK_ENTRIES: Final = 1 << 16
_MAX_ANCHOR_BYTES: Final = 1 << 16
_LEAF: Final = 0x02
_LASTING: Final = 0x3FEF
"""The flags of a page that mean something on disk."""


class Survivors(NamedTuple):
    """Blocks of one table, ascending by key.

    Attributes:
        proven: bool [blocks], whether each is certain to be the newest of its version.
        missing: how many more blocks the version has, of which nothing was found; -1 where that is not known.
    """

    block_keys: Words
    pages: NDArray[np.int64]
    proven: Flags
    missing: int


def choose_tree(path: Path, file_map: FileMap, page_bytes: int, store_id: bytes, doubts: list[str]) -> Meta:
    """The tree to save: a sound one that holds every commit that returned, or else the newest that can be entered.

    An anchored tree and all later ones hold every commit that returned.

    Args:
        doubts: receives what cannot be proven, in sentences.

    Raises:
        DamagedError: there is none.
    """
    raw = file_map.words.view(np.uint8)
    on_file = [raw[at : at + META_READ_BYTES].tobytes() for at in (0, page_bytes)]
    anchor = _read_anchor(path, store_id, page_bytes)
    anchored = [] if anchor is None else list(anchor.metas)
    if anchor is not None and not _same_boot(anchor) and on_file != anchored:
        on_file = []  # of what was written after the anchor, any part may have been lost
    parsed = [parse_meta(meta) for meta in (*anchored, *on_file)]
    metas = [meta for meta in parsed if isinstance(meta, Meta) and meta.page_bytes == page_bytes]
    metas.sort(key=lambda meta: meta.txn_id, reverse=True)
    metas = [meta for meta in metas if anchor is None or meta.txn_id >= anchor.txn_id]
    limit = file_map.file_bytes() // page_bytes
    usable = [meta for meta in metas if _can_enter(file_map, meta, limit)]
    if not usable:
        raise DamagedError(f"{path}: neither its meta pages nor {ANCHOR_NAME} lead to a tree; nothing can be saved.")
    if anchor is not None:
        sound = [m for m in usable if check_page_use(file_map.halves, m, limit).status == WalkStatus.DONE]
        return (sound or usable)[0]
    is_newest = len(metas) == 2 and metas[0].txn_id == metas[1].txn_id + 1 and usable[0] is metas[0]
    if not is_newest or free_pages(file_map.halves, usable[0], limit) is None:
        doubts.append(
            f"The meta pages of {path.name} or what they lead to are damaged, and no {ANCHOR_NAME} tells which of the "
            "two was the newer: later commits may be missing."
        )
    return usable[0]


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


def _can_enter(file_map: FileMap, meta: Meta, limit: int) -> bool:
    """Whether any entry can be reached from the root, or the list of free pages tells which pages are leaves."""
    entries = new_entries(_CHUNK_ENTRIES)
    walk = new_walk(meta.main_root, meta.main_depth, limit)
    count = list_sound(file_map.halves, meta.page_bytes // 2, limit, meta.main_depth, walk, entries)
    return bool((entries.sizes[:count] != GAP).any()) or free_pages(file_map.halves, meta, limit) is not None


def _joined(parts: list[Entries]) -> Entries:
    if not parts:
        return new_entries(0)
    block_keys, epochs, pages, sizes = zip(*parts, strict=True)
    return Entries(*map(np.concatenate, (block_keys, epochs)), *map(np.concatenate, (pages, sizes)))


def _selected(entries: Entries, which: "Flags | NDArray[np.int64] | slice") -> Entries:
    return Entries(entries.block_keys[which], entries.epochs[which], entries.pages[which], entries.sizes[which])


def list_entries(file_map: FileMap, meta: Meta) -> Entries:
    """All entries of the tree that can be read, in its order; see ``wreck.list_sound``. 32 bytes of memory an entry.

    Where a branch is broken, the leaves below it are found by their headers among the pages that are not free, and come
    last, with a gap between them.
    """
    limit = file_map.file_bytes() // meta.page_bytes
    walk = new_walk(meta.main_root, meta.main_depth, limit)
    parts = list(_walked(file_map, meta.page_bytes, meta.main_depth, walk))
    if any((part.sizes == GAP).any() for part in parts):
        gap = new_entries(1)
        gap.sizes[0] = GAP
        gap.block_keys[0] = META_KEY
        for page in _stray_leaves(file_map, meta, walk.seen).tolist():
            parts += [gap, *_walked(file_map, meta.page_bytes, 1, new_walk(page, 1, limit)), gap]
    return _joined(parts)


def _walked(file_map: FileMap, page_bytes: int, depth: int, walk: Walk) -> Iterator[Entries]:
    limit = len(walk.seen)
    while True:
        entries = new_entries(_CHUNK_ENTRIES)
        entries.block_keys[:] = META_KEY
        count = list_sound(file_map.halves, page_bytes // 2, limit, depth, walk, entries)
        if count == 0:
            return
        yield Entries(*(column[:count].copy() for column in entries))  # type: ignore[arg-type]


def _stray_leaves(file_map: FileMap, meta: Meta, seen: Flags) -> NDArray[np.int64]:
    """Pages that are leaves by their headers, are not free, and were not reached."""
    is_free = free_pages(file_map.halves, meta, len(seen))
    if is_free is None:
        return np.empty(0, np.int64)
    leaves = _leaves(file_map, meta.page_bytes)
    return leaves[~is_free[leaves] & ~seen[leaves]]


def _leaves(file_map: FileMap, page_bytes: int) -> NDArray[np.int64]:
    """Pages that are leaves by their headers, free ones too."""
    limit = file_map.file_bytes() // page_bytes
    heads = file_map.words[: limit * page_bytes // 8].reshape(limit, -1)[:, :2]
    flags = (heads[:, 1] >> np.uint64(16)) & np.uint64(_LASTING)
    return np.flatnonzero((heads[:, 0] == np.arange(limit, dtype=np.uint64)) & (flags == np.uint64(_LEAF)))


def old_records(file_map: FileMap, page_bytes: int) -> Entries:
    """Records on leaves of any age: what is left of them where the leaf that holds the newest is lost."""
    limit = file_map.file_bytes() // page_bytes
    parts: list[Entries] = []
    for page in _leaves(file_map, page_bytes).tolist():
        for entries in _walked(file_map, page_bytes, 1, new_walk(page, 1, limit)):
            is_record = (entries.sizes != GAP) & (entries.block_keys == META_KEY)
            parts.append(_selected(entries, is_record))
    return _joined(parts)


def _newest(entries: Entries) -> Entries:
    """Of each block the entry with the highest epoch, ascending by key."""
    order = np.lexsort((entries.epochs, entries.block_keys))
    keys = entries.block_keys[order]
    is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
    return _selected(entries, order[is_last])


def _tables_of(entries: Entries) -> NDArray[np.int64]:
    return (entries.block_keys >> np.uint64(KEY_ROW_BITS)).astype(np.int64)


def _agree(entries: Entries, record: CommitRecord, num_tables: int) -> Flags:
    """Of each table, whether these are the blocks that the commit recorded."""
    counts, hashes = np.zeros(num_tables, np.int64), np.zeros(num_tables, np.uint64)
    tally(entries.block_keys, entries.epochs, counts, hashes)
    wanted = [record.tables.get(table, TableTotals()) for table in range(num_tables)]
    same = [TableTotals(num_blocks=int(count), hash=int(total)) for count, total in zip(counts, hashes, strict=True)]
    return np.array([one == other for one, other in zip(same, wanted, strict=True)], np.bool_)


class _Tree(NamedTuple):
    """Blocks of known tables that the tree leads to, with epochs up to the version."""

    blocks: Entries
    is_certain: Flags
    """The block's header says the same, and nothing is missing behind the entry."""
    same_epoch: Flags


def _tree_blocks(file_map: FileMap, page_bytes: int, listed: Entries, shapes: TableShapes, version: int) -> _Tree:
    num_tables = len(shapes.num_blocks)
    table = np.minimum(_tables_of(listed), num_tables - 1)
    block = (listed.block_keys & np.uint64((1 << KEY_ROW_BITS) - 1)).astype(np.int64)
    is_known = (listed.sizes != GAP) & (_tables_of(listed) < num_tables)
    fits = is_known & (listed.pages > 0) & (block < shapes.num_blocks[table])
    fits &= listed.sizes == shapes.pages_per_block[table] * page_bytes - 16
    keys, epochs = np.zeros_like(listed.block_keys), np.zeros_like(listed.epochs)
    limit = file_map.file_bytes() // page_bytes
    read_headers(file_map.words, page_bytes // 8, limit, np.where(fits, listed.pages, 0), keys, epochs)
    agrees = fits & (keys == listed.block_keys) & (epochs == listed.epochs)
    is_record = (listed.sizes != GAP) & (listed.block_keys == META_KEY)
    is_strange = (listed.sizes != GAP) & ~is_record & (_tables_of(listed) >= num_tables)
    is_sound = agrees | is_record | is_strange
    is_certain = agrees & np.append(is_sound[1:], True)[: len(agrees)]
    chosen = fits & (listed.epochs > 0) & (listed.epochs <= np.uint64(version))
    return _Tree(_selected(listed, chosen), is_certain[chosen], (epochs == listed.epochs)[chosen])


def _scanned(file_map: FileMap, page_bytes: int, shapes: TableShapes, version: int) -> Entries:
    """Blocks of these tables by their headers, wherever they lie in the file."""
    limit = file_map.file_bytes() // page_bytes
    parts: list[Entries] = []
    for start in range(2, limit, _CHUNK_ENTRIES):
        entries = new_entries(_CHUNK_ENTRIES)
        count = scan_blocks(file_map.words, page_bytes // 8, limit, start, shapes, version, entries)
        parts.append(_selected(entries, slice(0, count)))
    return _joined(parts)


def surviving_blocks(
    file_map: FileMap, meta: Meta, listed: Entries, record: CommitRecord, shapes: TableShapes
) -> dict[int, Survivors]:
    """The newest block of each number, table by table, for a version; a record without tables proves nothing.

    Args:
        listed: the tree's entries, of ``list_entries``.
        shapes: of all tables of the store.
    """
    num_tables = len(shapes.num_blocks)
    if not num_tables:
        return {}
    tree = _tree_blocks(file_map, meta.page_bytes, listed, shapes, record.version)
    by_key = np.lexsort((tree.blocks.epochs, tree.blocks.block_keys))
    keys = tree.blocks.block_keys[by_key]
    last = by_key[np.append(keys[1:] != keys[:-1], True)[: len(keys)]]
    newest, is_certain, same_epoch = _selected(tree.blocks, last), tree.is_certain[last], tree.same_epoch[last]
    agrees = _agree(newest, record, num_tables)
    found = {}
    others = np.zeros_like(shapes.pages_per_block)
    others[~agrees] = shapes.pages_per_block[~agrees]
    scanned = new_entries(0)
    is_free: Flags | None = None
    if not agrees.all():
        scanned = _scanned(file_map, meta.page_bytes, shapes._replace(pages_per_block=others), record.version)
        is_free = free_pages(file_map.halves, meta, file_map.file_bytes() // meta.page_bytes)
    for table in range(num_tables):
        own = _tables_of(newest) == table
        if agrees[table]:
            part = _selected(newest, own)
            found[table] = Survivors(part.block_keys, part.pages, same_epoch[own], 0)
        else:
            pieces = _selected(scanned, _tables_of(scanned) == table)
            wanted = record.tables.get(table, TableTotals())
            found[table] = _pieced(table, _selected(newest, own), is_certain[own], pieces, is_free, wanted)
    return found


def _pieced(
    table: int, newest: Entries, is_certain: Flags, scanned: Entries, is_free: Flags | None, wanted: TableTotals
) -> Survivors:
    """The blocks of a table of which the tree does not show what was committed."""
    in_use = _newest(scanned if is_free is None else _selected(scanned, ~is_free[scanned.pages]))
    record = CommitRecord(tables={table: wanted})
    if is_free is not None and _agree(in_use, record, table + 1)[table]:
        return Survivors(in_use.block_keys, in_use.pages, np.ones(len(in_use.pages), np.bool_), 0)
    # Block by block: what the tree leads to for certain, unless some page has a newer one.
    best = _newest(_joined([scanned, in_use, newest]))
    place = np.searchsorted(newest.block_keys, best.block_keys)
    place = np.minimum(place, max(0, len(newest.pages) - 1))
    proven = np.zeros(len(best.pages), np.bool_)
    if len(newest.pages):
        same = (newest.block_keys[place] == best.block_keys) & (newest.epochs[place] == best.epochs)
        proven = same & is_certain[place]
        best.pages[proven] = newest.pages[place[proven]]
    return Survivors(best.block_keys, best.pages, proven, max(0, wanted.num_blocks - len(best.pages)))
