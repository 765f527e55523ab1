"""Which blocks a version shows, and which no version shows any more.

Of each block a version shows the newest epoch that is not above its own number. So an entry is garbage if the block
has a newer one that the oldest kept version shows already, or if its epoch is above the current version and the process
that wrote it is gone.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..rows import MAX_ROWS, MAX_TABLES
from .btree import META_KEY, Entries
from .directory import Directory, tally
from .records import CommitRecord, Head, TableTotals, version_of_item
from .snapshot import Tree

__all__ = ["garbage", "next_totals", "selected", "stale_items", "superseded", "totals_of"]

Words = NDArray[np.uint64]
Int64s = NDArray[np.int64]


def selected(entries: Entries, which: "NDArray[np.int64] | NDArray[np.bool_] | slice") -> Entries:
    """The entries at these positions."""
    block_keys, epochs, pages, sizes = entries
    return Entries(block_keys[which], epochs[which], pages[which], sizes[which])


def _joined(parts: list[Entries]) -> Entries:
    block_keys, epochs, pages, sizes = zip(*parts, strict=True)
    return Entries(*map(np.concatenate, (block_keys, epochs)), *map(np.concatenate, (pages, sizes)))


def _with_successors(snapshot: Tree) -> Iterator[tuple[Entries, Words]]:
    """Blocks in key order, in chunks, and of each the epoch of the next entry of the same block; 0 if it has none."""
    held: Entries | None = None
    for entries, count in snapshot.walk():
        chunk = selected(entries, np.flatnonzero(entries.block_keys[:count] != META_KEY))
        if held is not None:
            chunk = _joined([held, chunk])
        if len(chunk.pages):
            yield _successors(chunk, complete=False)
            held = selected(chunk, slice(len(chunk.pages) - 1, None))
    if held is not None:
        yield _successors(held, complete=True)


def _successors(chunk: Entries, *, complete: bool) -> tuple[Entries, Words]:
    """All entries but the last, whose successor is not known yet; or the last one alone."""
    if complete:
        return chunk, np.zeros(len(chunk.pages), np.uint64)
    following = np.where(chunk.block_keys[1:] == chunk.block_keys[:-1], chunk.epochs[1:], np.uint64(0))
    return selected(chunk, slice(0, len(chunk.pages) - 1)), following


def garbage(snapshot: Tree, current: int, oldest: int) -> Iterator[Entries]:
    """What no version from ``oldest`` to ``current`` shows, found by a walk of the whole tree, in chunks."""
    for entries, following in _with_successors(snapshot):
        is_old = (following != 0) & (following <= np.uint64(oldest))
        loose = selected(entries, is_old | (entries.epochs > np.uint64(current)))
        if len(loose.pages):
            yield loose


def stale_items(snapshot: Tree, head: Head) -> list[int]:
    """Records and payload chunks of versions that the head does not name."""
    items = [item for entries, count in snapshot.walk(int(META_KEY)) for item in entries.epochs[:count].tolist()]
    return [item for item in items if version_of_item(item) and version_of_item(item) not in head.kept]


def totals_of(snapshot: Tree, version: int) -> dict[int, TableTotals]:
    """Count and hash of the blocks that a version shows, found by a walk of the whole tree.

    Raises:
        ValueError: the index names a table that cannot be; says which.
    """
    counts, hashes = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    for entries, following in _with_successors(snapshot):
        is_newer = (following == 0) | (following > np.uint64(version))
        shown = selected(entries, is_newer & (entries.epochs <= np.uint64(version)))
        if not len(shown.pages):
            continue
        length = int(shown.block_keys[-1]) // MAX_ROWS + 1
        if length > MAX_TABLES:
            raise ValueError(f"its index names table {length - 1}")
        if length > len(counts):
            counts = np.concatenate([counts, np.zeros(length - len(counts), np.int64)])
            hashes = np.concatenate([hashes, np.zeros(length - len(hashes), np.uint64)])
        tally(shown.block_keys, shown.epochs, counts, hashes)
    return _table_totals(counts, hashes)


def _table_totals(counts: Int64s, hashes: Words) -> dict[int, TableTotals]:
    return {
        table: TableTotals(num_blocks=int(counts[table]), hash=int(hashes[table]))
        for table in np.flatnonzero(counts).tolist()
    }


def next_totals(snapshot: Tree, directory: Directory, record: CommitRecord, version: int) -> dict[int, TableTotals]:
    """Totals of ``version``, from those of the version before it and the blocks written since."""
    length = 1 + max([*record.tables, *directory.layouts], default=0)
    counts, hashes = np.zeros(length, np.int64), np.zeros(length, np.uint64)
    for table, totals in record.tables.items():
        counts[table], hashes[table] = totals.num_blocks, totals.hash
    old_counts, old_hashes = np.zeros(length, np.int64), np.zeros(length, np.uint64)
    for block_keys in directory.written_blocks(record.version, version):
        old, new = _newest_epochs(snapshot, block_keys, record.version, version)
        assert new.all(), "a written block is not in the tree"
        tally(block_keys, new, counts, hashes)
        tally(block_keys[old != 0], old[old != 0], old_counts, old_hashes)
    return _table_totals(counts - old_counts, hashes - old_hashes)


def _newest_epochs(snapshot: Tree, block_keys: Words, first: int, second: int) -> tuple[Words, Words]:
    """Each block's newest epoch up to ``first``, and up to ``second``, which is above it; 0 for none."""
    limits = np.uint64(first), np.uint64(second)
    found = np.zeros_like(block_keys), np.zeros_like(block_keys)
    from_epoch = np.zeros_like(block_keys)
    active = np.arange(len(block_keys))
    while len(active):
        entries = snapshot.seek(block_keys[active], from_epoch[active])
        is_entry = (entries.block_keys == block_keys[active]) & (entries.epochs <= limits[1])
        active, epochs = active[is_entry], entries.epochs[is_entry]
        for newest, limit in zip(found, limits, strict=True):
            newest[active[epochs <= limit]] = epochs[epochs <= limit]
        from_epoch[active] = epochs + np.uint64(1)
    return found


def superseded(snapshot: Tree, block_keys: Words, oldest: int) -> Entries:
    """The entries of these blocks that the version ``oldest`` and later ones do not show."""
    parts = []
    entries = snapshot.seek(block_keys, np.zeros_like(block_keys))
    while len(block_keys):
        following = snapshot.seek(block_keys, entries.epochs + np.uint64(1))
        is_old = (following.block_keys == block_keys) & (following.epochs <= np.uint64(oldest))
        parts.append(selected(entries, is_old))
        block_keys, entries = block_keys[is_old], selected(following, is_old)
    return _joined(parts)
