"""The records of a tree, read and checked: whose file it is, and which versions it shows."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ChecksumError, FormatError, StoreNotFoundError
from ..system.oserrors import RESTORE
from .btree import META_KEY
from .checksum import bytes_checksum
from .indexes import require_logged, stored_segments
from .records import (
    HEAD_ITEM,
    STORE_ITEM,
    CommitRecord,
    Head,
    LogRecord,
    commit_item,
    item_key,
    payload_item,
    unpack_commit,
    unpack_head,
    unpack_store,
    version_of_item,
)
from .snapshot import Tree


def check_store(snapshot: Tree, store_id: bytes) -> LogRecord:
    """See whose file it is, and that its tree lists every segment; returns the record of the log.

    Raises:
        DamagedError: the tree is damaged, or a segment is missing.
        FormatError: the file is another store's, or no store's.
    """
    record = snapshot.get(item_key(STORE_ITEM))
    if record is None:
        raise FormatError(f"{snapshot.path}: not a tierstore file (it has no store record). {RESTORE}")
    with _naming(snapshot.path, "its store record"):
        found = unpack_store(record)
    if found != store_id:
        raise FormatError(
            f"{snapshot.path}: belongs to store {found.hex()}, not to {store_id.hex()}: files of two stores "
            f"were mixed. {RESTORE}"
        )
    return require_logged(snapshot, stored_segments(snapshot)["number"])


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
        return CommitRecord()
    stored = snapshot.get(item_key(commit_item(version)))
    with _naming(snapshot.path, f"the commit record of version {version}"):
        if stored is None:
            raise ValueError("it is missing")
        record = unpack_commit(stored)
        if record.version != version:
            raise ValueError(f"it is of version {record.version}")
        return record


def stale_items(snapshot: Tree, head: Head) -> list[int]:
    """Records and payload chunks of versions that the head does not name."""
    items = snapshot.walk(int(META_KEY))["number"].tolist()
    return [item for item in items if version_of_item(item) and version_of_item(item) not in head.kept]


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
