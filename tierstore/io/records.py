"""The small records beside the segments: which store this is, which versions it shows, what the log holds.

Each ends in the XXH64 of what comes before. Integers are little-endian uint64. docs/format.md draws them.
"""

import struct
from typing import Final, NamedTuple

from .btree import META_KEY, SEGMENTS_KEY
from .checksum import bytes_checksum

STORE_ITEM: Final = 0
HEAD_ITEM: Final = 1
LOG_ITEM: Final = 2
_ITEM_BITS: Final = 24
"""Of an item's number, for its place among the items of its version."""
MAX_VERSION: Final = (1 << 40) - 1
PAYLOAD_CHUNK_BYTES: Final = (1 << 20) - 16
"""A payload is cut into chunks: long runs of free pages are hard to find in a file that has been in use for a while."""

MAX_PAYLOAD_BYTES: Final = ((1 << _ITEM_BITS) - 1) * PAYLOAD_CHUNK_BYTES

_MAGIC: Final = b"tierrows"
_FORMAT: Final = 4
_OLD_FORMATS: Final = (1, 2, 3)


class OtherFormatError(ValueError):
    """A record that is sound, of another release's format."""


class LogRecord(NamedTuple):
    """What the file holds of the log; put by each transaction that changes it."""

    next_number: int = 1
    """Of the next segment; numbers are never used again."""
    num_segments: int = 0
    hash: int = 0
    """Sum of ``checksum.mix_key`` of their numbers, modulo 2**64."""


class Head(NamedTuple):
    """Which versions the file shows."""

    last: int = 0
    """The highest number that was ever given to a version; numbers are not used again, not after a rollback either."""
    kept: tuple[int, ...] = ()
    """Ascending; the last one is the current version. Empty before the first commit."""

    @property
    def current(self) -> int:
        return self.kept[-1] if self.kept else 0


class CommitRecord(NamedTuple):
    version: int = 0
    payload_bytes: int = 0
    payload_checksum: int = 0

    @property
    def num_payload_chunks(self) -> int:
        return -(-self.payload_bytes // PAYLOAD_CHUNK_BYTES)


def item_key(item: int) -> bytes:
    """LMDB key of a record."""
    return struct.pack(">QQ", int(META_KEY), item)


def commit_item(version: int) -> int:
    """Number of a version's commit record."""
    return version << _ITEM_BITS


def payload_item(version: int, chunk: int) -> int:
    """Number of a chunk of a version's payload."""
    return (version << _ITEM_BITS) + 1 + chunk


def segment_key(number: int) -> bytes:
    """LMDB key of a segment."""
    return struct.pack(">QQ", int(SEGMENTS_KEY), number)


def version_of_item(item: int) -> int:
    """The version that a record belongs to; 0 for those of the whole file."""
    return item >> _ITEM_BITS


def _sealed(data: bytes) -> bytes:
    return data + struct.pack("<Q", bytes_checksum(data))


def _unsealed(data: bytes) -> bytes:
    """Raises ValueError if the record does not match its checksum."""
    if len(data) < 8 or struct.unpack("<Q", data[-8:])[0] != bytes_checksum(data[:-8]):
        raise ValueError("the record does not match its checksum")
    return data[:-8]


def pack_store(store_id: bytes) -> bytes:
    return _sealed(struct.pack("<8sQ16s", _MAGIC, _FORMAT, store_id))


def unpack_store(data: bytes) -> bytes:
    """The store's id; ValueError, OtherFormatError among them, or struct.error say what is wrong."""
    body = _unsealed(data)
    magic, version, store_id = struct.unpack_from("<8sQ16s", body)
    if magic != _MAGIC:
        raise ValueError("the record is not a tierstore record")
    if version in _OLD_FORMATS:
        raise OtherFormatError(
            f"format version {version}, of an older release; this one reads version {_FORMAT}: with the older release "
            "run tierstore export, then with this one tierstore import"
        )
    if version != _FORMAT or len(body) != 32:
        raise OtherFormatError(f"format version {version}; this release reads version {_FORMAT}")
    return bytes(store_id)


def first_records(store_id: bytes) -> dict[bytes, bytes]:
    """The records of a new file, by LMDB key."""
    items = {STORE_ITEM: pack_store(store_id), HEAD_ITEM: pack_head(Head()), LOG_ITEM: pack_words(*LogRecord())}
    return {item_key(item): record for item, record in items.items()}


def pack_words(*words: int) -> bytes:
    """A ``LogRecord`` or a ``CommitRecord``."""
    return _sealed(struct.pack(f"<{len(words)}Q", *words))


def _unpack_words(data: bytes) -> tuple[int, int, int]:
    body = _unsealed(data)
    if len(body) != 24:
        raise ValueError("the record has the wrong length")
    first, second, third = struct.unpack("<QQQ", body)
    return first, second, third


def unpack_log(data: bytes) -> LogRecord:
    """ValueError says what is wrong."""
    return LogRecord(*_unpack_words(data))


def pack_head(head: Head) -> bytes:
    return pack_words(head.last, len(head.kept), *head.kept)


def unpack_head(data: bytes) -> Head:
    """ValueError says what is wrong."""
    body = _unsealed(data)
    last, count = struct.unpack_from("<QQ", body)
    if len(body) != 16 + 8 * count:
        raise ValueError("the record has the wrong length")
    kept = struct.unpack_from(f"<{count}Q", body, 16)
    if (kept and kept[0] == 0) or last > MAX_VERSION or list(kept) != sorted(set(kept)) or max(kept, default=0) > last:
        raise ValueError("its versions are out of order")
    return Head(last=last, kept=kept)


def unpack_commit(data: bytes) -> CommitRecord:
    """ValueError says what is wrong."""
    record = CommitRecord(*_unpack_words(data))
    if record.payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {record.payload_bytes} bytes")
    return record
