"""The records of a tree, read and checked: whose file it is, and which versions it shows."""

import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from ..errors import ChecksumError, DamagedError, FormatError, StoreNotFoundError
from ..system.oserrors import RESTORE
from . import records
from .btree import META_KEY
from .checksum import bytes_checksum
from .indexes import Stored, numbers_hash, stored_segments
from .records import CommitRecord, Head, LogRecord
from .snapshot import Tree

T = TypeVar("T")


def _read(tree: Tree, item: int, what: str, unpack: Callable[[bytes], T]) -> T:
    """A record; FormatError if it is missing or damaged."""
    found = tree.get(records.item_key(item))
    try:
        if found is None:
            raise ValueError("it is missing")
        return unpack(found)
    except (ValueError, struct.error) as error:
        raise FormatError(f"{tree.path}: {what} is damaged: {error}. {RESTORE}") from error


def check_store(tree: Tree, store_id: bytes) -> LogRecord:
    """See whose file it is, and that its tree lists every segment; returns the record of the log.

    Raises:
        DamagedError: the tree is damaged, or a segment is missing.
        FormatError: the file is another store's, or no store's.
    """
    if tree.get(records.item_key(records.STORE_ITEM)) is None:
        raise FormatError(f"{tree.path}: not a tierstore file (it has no store record). {RESTORE}")
    found = _read(tree, records.STORE_ITEM, "its store record", records.unpack_store)
    if found != store_id:
        raise FormatError(
            f"{tree.path}: belongs to store {found.hex()}, not to {store_id.hex()}: files of two stores were mixed. "
            f"{RESTORE}"
        )
    return require_logged(tree, stored_segments(tree))


def read_log(tree: Tree) -> LogRecord:
    """The record of the log; FormatError if it is missing or damaged."""
    return _read(tree, records.LOG_ITEM, "its record of the log", records.unpack_log)


def require_logged(tree: Tree, stored: Stored) -> LogRecord:
    """Compare the segments with what the writer counted: one that went missing is found here.

    Raises:
        FormatError: the record of the log is damaged. DamagedError: there are other segments than it counts.
    """
    log = read_log(tree)
    if (len(stored), numbers_hash(stored)) != (log.num_segments, log.hash):
        raise DamagedError(
            f"{tree.path}: its tree has {len(stored):,} segments, and its record of the log counts "
            f"{log.num_segments:,} others. {RESTORE}"
        )
    return log


def chosen_version(path: Path, head: Head, wanted: int | None) -> int:
    """The version to show: the current one, or a kept one that is wanted."""
    if wanted is None:
        return head.current
    if wanted not in head.kept:
        kept = ", ".join(map(str, head.kept)) or "none"
        raise StoreNotFoundError(f"{path}: version {wanted} is not kept; kept: {kept}.")
    return wanted


def read_head(tree: Tree) -> Head:
    """Which versions there are; FormatError if the record is missing or damaged."""
    return _read(tree, records.HEAD_ITEM, "its record of versions", records.unpack_head)


def read_record(tree: Tree, version: int) -> CommitRecord:
    """The commit record of a version that the head names; of version 0, an empty one."""
    if not version:
        return CommitRecord()
    what = f"the commit record of version {version}"
    record = _read(tree, records.commit_item(version), what, records.unpack_commit)
    if record.version != version:
        raise FormatError(f"{tree.path}: {what} is damaged: it is of version {record.version}. {RESTORE}")
    return record


def stale_items(snapshot: Tree, head: Head) -> list[int]:
    """Records and payload chunks of versions that the head does not name."""
    items = snapshot.walk(int(META_KEY))["number"].tolist()
    return [item for item in items if records.version_of_item(item) and records.version_of_item(item) not in head.kept]


def read_payload(snapshot: Tree, record: CommitRecord) -> bytes:
    """What a version was committed with.

    Raises:
        ChecksumError: it is not what was written.
    """
    buffer = BytesIO()  # gives what it holds without a copy
    for number in range(record.num_payload_chunks):
        buffer.write(snapshot.get(records.item_key(records.payload_item(record.version, number))) or b"")
    payload = buffer.getvalue()
    if len(payload) != record.payload_bytes or (payload and bytes_checksum(payload) != record.payload_checksum):
        raise ChecksumError(f"{snapshot.path}: the payload of version {record.version} is damaged. {RESTORE}")
    return payload
