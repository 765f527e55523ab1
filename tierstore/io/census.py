"""What is in the tree, against what commits recorded: a block that went missing is found at the open."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ChecksumError, DamagedError, FormatError, StoreNotFoundError
from ..rows import RowLayout
from .checksum import bytes_checksum
from .files import RESTORE
from .placement import Placement, unpack_placement
from .records import (
    HEAD_ITEM,
    PLACEMENT_COPIES,
    STORE_ITEM,
    CommitRecord,
    Head,
    StoreRecord,
    TableTotals,
    commit_item,
    item_key,
    payload_item,
    placement_item,
    unpack_commit,
    unpack_head,
    unpack_placement_chunk,
    unpack_store,
)
from .snapshot import Tree
from .versions import totals_of

__all__ = [
    "check_census",
    "check_placement",
    "check_store",
    "chosen_version",
    "num_places",
    "read_head",
    "read_payload",
    "read_placement",
    "read_record",
]


def check_store(snapshot: Tree, store_id: bytes) -> StoreRecord:
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
    if found.store_id != store_id:
        raise FormatError(
            f"{snapshot.path}: belongs to store {found.store_id.hex()}, not to {store_id.hex()}: files of two stores "
            f"were mixed. {RESTORE}"
        )
    return found


def read_placement(snapshot: Tree, stored: StoreRecord) -> Placement | None:
    """Where the file's rows lie; None if they lie at their own places.

    Raises:
        ChecksumError, FormatError: a part of it is missing, or not what was written.
    """
    if not stored.placement_bytes:
        return None
    return _placement(snapshot, stored, 0)


def check_placement(snapshot: Tree) -> None:
    """Read every copy of the placement; raises as ``read_placement`` does."""
    with _naming(snapshot.path, "its store record"):
        stored = unpack_store(snapshot.get(item_key(STORE_ITEM)) or b"")
    for copy in range(PLACEMENT_COPIES if stored.placement_bytes else 0):
        _placement(snapshot, stored, copy)


def _placement(snapshot: Tree, stored: StoreRecord, copy: int) -> Placement:
    parts = []
    for number in range(stored.num_placement_chunks):
        part = snapshot.get(item_key(placement_item(number, copy)))
        try:
            parts.append(unpack_placement_chunk(part or b"", number))
        except (ValueError, struct.error) as error:
            what = "missing" if part is None else f"damaged: {error}"
            raise ChecksumError(
                f"{snapshot.path}: part {number} of the record of where its rows lie is {what}. {RESTORE}"
            ) from error
    data = b"".join(parts)
    with _naming(snapshot.path, "its record of where rows lie"):
        if len(data) != stored.placement_bytes or bytes_checksum(data) != stored.placement_checksum:
            raise ValueError("it is not the one that the store record names")
        return unpack_placement(data)


def num_places(path: Path, placement: Placement | None, table_index: int, layout: RowLayout, num_rows: int) -> int:
    """Places of a table with its rows, and an area behind it included.

    Raises:
        FormatError: the placement is not one of such a table.
    """
    try:
        return num_rows if placement is None else placement.stored_rows(table_index, layout, num_rows)
    except ValueError as error:
        raise FormatError(
            f"{path}: its record of where rows lie does not fit its tables (is the manifest another store's?): "
            f"{error}. {RESTORE}"
        ) from error


def chosen_version(path: Path, head: Head, wanted: int | None) -> int:
    """The version to show: the current one, or a kept one that is wanted."""
    if wanted is None:
        return head.current
    if wanted not in head.kept:
        kept = ", ".join(map(str, head.kept)) or "none"
        raise StoreNotFoundError(f"{path}: version {wanted} is not kept; kept: {kept}.")
    return wanted


def read_head(snapshot: Tree) -> Head:
    """Which versions there are; FormatError if the record is missing or damaged."""
    stored = snapshot.get(item_key(HEAD_ITEM))
    with _naming(snapshot.path, "its record of versions"):
        if stored is None:
            raise ValueError("it is missing")
        return unpack_head(stored)


def read_record(snapshot: Tree, version: int) -> CommitRecord:
    """The commit record of a version that the head names; of version 0, an empty one."""
    if not version:
        return CommitRecord(tables={})
    stored = snapshot.get(item_key(commit_item(version)))
    with _naming(snapshot.path, f"the commit record of version {version}"):
        if stored is None:
            raise ValueError("it is missing")
        record = unpack_commit(stored)
        if record.version != version:
            raise ValueError(f"it is of version {record.version}")
        return record


def check_census(snapshot: Tree, record: CommitRecord) -> None:
    """Compare the blocks in the tree with what a version recorded of them.

    Raises:
        DamagedError: names a table whose blocks are not those that were committed.
    """
    with _naming(snapshot.path, "its index"):
        found = totals_of(snapshot, record.version)
    for table in sorted(found.keys() | record.tables.keys()):
        have, want = found.get(table, TableTotals()), record.tables.get(table, TableTotals())
        if have != want:
            raise DamagedError(
                f"{snapshot.path}: table {table} has {have.num_blocks} blocks in the index, version {record.version} "
                f"recorded {want.num_blocks}{' others' if have.num_blocks == want.num_blocks else ''}. {RESTORE}"
            )


def read_payload(snapshot: Tree, record: CommitRecord) -> bytes:
    """What a version was committed with.

    Raises:
        ChecksumError: it is not what was written.
    """
    chunks = []
    for number in range(record.num_payload_chunks):
        chunk = snapshot.get(item_key(payload_item(record.version, number)))
        if chunk is None:
            break
        chunks.append(chunk)
    payload = b"".join(chunks)
    if len(payload) != record.payload_bytes or (payload and bytes_checksum(payload) != record.payload_checksum):
        raise ChecksumError(f"{snapshot.path}: the payload of version {record.version} is damaged. {RESTORE}")
    return payload


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Turn the ValueError or struct.error of a record into a FormatError."""
    try:
        yield
    except (ValueError, struct.error) as error:
        raise FormatError(f"{path}: {what} is damaged: {error}. {RESTORE}") from error
