"""What is in the tree, against what the last commit recorded: a block that went missing is found at the open."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, FormatError
from ..rows import MAX_ROWS, MAX_TABLES
from .btree import META_KEY
from .directory import tally
from .files import RESTORE
from .records import COMMIT_ITEM, STORE_ITEM, CommitRecord, TableTotals, item_key, unpack_commit, unpack_store
from .snapshot import Snapshot

__all__ = ["check_census", "check_store", "check_tree_totals", "read_record", "table_totals"]


def check_store(snapshot: Snapshot, store_id: bytes) -> None:
    """Walk the whole tree, after which LMDB's own code may follow it, then see whose file it is.

    Raises:
        DamagedError: the tree is damaged.
        FormatError: the file is another store's, or no store's.
    """
    for _ in snapshot.walk():
        pass
    stored = snapshot.get(item_key(STORE_ITEM))
    if stored is None:
        raise FormatError(f"{snapshot.path}: not a tierstore file (it has no store record). {RESTORE}")
    with _naming(snapshot.path, "its store record"):
        found = unpack_store(stored)
    if found != store_id:
        raise FormatError(
            f"{snapshot.path}: belongs to store {found.hex()}, not to {store_id.hex()}: files of two stores were "
            f"mixed. {RESTORE}"
        )


def read_record(snapshot: Snapshot) -> CommitRecord:
    """The last commit's record; version 0 if there was none."""
    stored = snapshot.get(item_key(COMMIT_ITEM))
    if stored is None:
        return CommitRecord(tables={})
    with _naming(snapshot.path, "its commit record"):
        return unpack_commit(stored)


def check_census(snapshot: Snapshot) -> CommitRecord:
    """The last commit's record, after a comparison with the blocks in the tree."""
    record = read_record(snapshot)
    check_tree_totals(snapshot, record)
    return record


def check_tree_totals(snapshot: Snapshot, record: CommitRecord) -> None:
    """Count and hash the blocks of each table with epochs up to the record's version.

    Raises:
        DamagedError: names a table whose blocks are not those that were committed.
    """
    counts, hashes = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    for entries, count in snapshot.walk():
        blocks = entries.block_keys[:count]
        blocks = blocks[blocks != META_KEY]
        length = int(blocks[-1]) // MAX_ROWS + 1 if len(blocks) else 0
        if length > MAX_TABLES:
            raise DamagedError(f"{snapshot.path}: its index names table {length - 1}. {RESTORE}")
        if length > len(counts):
            counts = np.concatenate([counts, np.zeros(length - len(counts), np.int64)])
            hashes = np.concatenate([hashes, np.zeros(length - len(hashes), np.uint64)])
        tally(entries, count, record.version, counts, hashes)
    found = table_totals(counts, hashes)
    for table in sorted(found.keys() | record.tables.keys()):
        have, want = found.get(table, TableTotals()), record.tables.get(table, TableTotals())
        if have != want:
            raise DamagedError(
                f"{snapshot.path}: table {table} has {have.num_blocks} blocks in the index, the last commit recorded "
                f"{want.num_blocks}{' others' if have.num_blocks == want.num_blocks else ''}. {RESTORE}"
            )


def table_totals(counts: NDArray[np.int64], hashes: NDArray[np.uint64]) -> dict[int, TableTotals]:
    """Of counts and hashes by table index."""
    return {
        table: TableTotals(num_blocks=int(counts[table]), hash=int(hashes[table]))
        for table in np.flatnonzero(counts).tolist()
    }


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Turn the ValueError or struct.error of a record into a FormatError."""
    try:
        yield
    except (ValueError, struct.error) as error:
        raise FormatError(f"{path}: {what} is damaged: {error}. {RESTORE}") from error
