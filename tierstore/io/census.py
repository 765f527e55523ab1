"""What is in the tree, against what commits recorded: a block that went missing is found at the open."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ChecksumError, DamagedError, FormatError
from .checksum import bytes_checksum
from .files import RESTORE
from .records import (
    HEAD_ITEM,
    STORE_ITEM,
    CommitRecord,
    Head,
    TableTotals,
    commit_item,
    item_key,
    payload_item,
    unpack_commit,
    unpack_head,
    unpack_store,
)
from .snapshot import Snapshot
from .versions import totals_of

__all__ = ["check_census", "check_store", "read_head", "read_payload", "read_record"]


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


def read_head(snapshot: Snapshot) -> Head:
    """Which versions there are; FormatError if the record is missing or damaged."""
    stored = snapshot.get(item_key(HEAD_ITEM))
    with _naming(snapshot.path, "its record of versions"):
        if stored is None:
            raise ValueError("it is missing")
        return unpack_head(stored)


def read_record(snapshot: Snapshot, version: int) -> CommitRecord:
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


def check_census(snapshot: Snapshot, record: CommitRecord) -> None:
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


def read_payload(snapshot: Snapshot, record: CommitRecord) -> bytes:
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
