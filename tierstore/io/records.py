"""The small records next to the segments: which store this is, which versions it shows, what the log holds.

Each ends in the XXH64 of what comes before. Integers are little-endian uint64. docs/format.md draws them.
"""

import struct
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

from ..errors import ChecksumError, DamagedError, FormatError
from ..system.files import RESTORE
from .meta import META_KEY, SEGMENTS_KEY, PlainTree, bytes_checksum

if TYPE_CHECKING:
    from .segments import Stored
    from .snapshot import Tree

AnyTree: TypeAlias = "Tree | PlainTree"
STORE_ITEM, HEAD_ITEM, LOG_ITEM = range(3)
_ITEM_BITS: Final = 24  # of an item's number, for its place among the items of its version
MAX_VERSION: Final = (1 << 40) - 1
PAYLOAD_CHUNK_BYTES: Final = (1 << 20) - 16
"""A payload is cut into chunks: long runs of free pages are hard to find in a file that has been in use for a while."""
MAX_PAYLOAD_BYTES: Final = ((1 << _ITEM_BITS) - 1) * PAYLOAD_CHUNK_BYTES
_MAGIC: Final = b"tierrows"
_FORMAT: Final = 5
_FORMAT_BEFORE: Final = 4  # all rows have the checksums of then; the first that are written make the file one of ours


class OtherFormatError(ValueError):
    """A record that is sound, of another release's format."""


class LogRecord(NamedTuple):  # what the file holds of the log; put by each transaction that changes it
    next_number: int = 1  # of the next segment; numbers are never used again
    num_segments: int = 0
    hash: int = 0  # sum of ``checksum.mix_key`` of their numbers, modulo 2**64


class Head(NamedTuple):  # which versions the file shows
    last: int = 0  # the highest number ever given to a version; none is used again, not after a rollback either
    kept: tuple[int, ...] = ()  # ascending; the last one is the current version; empty before the first commit

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
    return struct.pack(">QQ", META_KEY, item)


def version_item(version: int, chunk: int = -1) -> int:
    """A chunk of a version's payload; by default its commit record."""
    return (version << _ITEM_BITS) + 1 + chunk


def segment_key(number: int) -> bytes:
    return struct.pack(">QQ", SEGMENTS_KEY, number)


def _sealed(data: bytes) -> bytes:
    return data + struct.pack("<Q", bytes_checksum(data))


def _unsealed(data: bytes) -> bytes:
    if len(data) < 8 or struct.unpack("<Q", data[-8:])[0] != bytes_checksum(data[:-8]):
        raise ValueError("the record does not match its checksum")
    return data[:-8]


def pack_store(store_id: bytes) -> bytes:
    return _sealed(struct.pack("<8sQ16s", _MAGIC, _FORMAT, store_id))


def unpack_store(data: bytes) -> bytes:
    """The store's id. OtherFormatError: of another release's format."""
    body = _unsealed(data)
    magic, version, store_id = struct.unpack_from("<8sQ16s", body)
    if magic != _MAGIC:
        raise ValueError("the record is not a tierstore record")
    if version not in (_FORMAT, _FORMAT_BEFORE) or len(body) != 32:
        raise OtherFormatError(
            f"format version {version}; this release reads {_FORMAT_BEFORE} and {_FORMAT}. Open it with the release "
            "that wrote it"
        )
    return bytes(store_id)


def pack_words(*words: int) -> bytes:
    """A ``LogRecord`` or a ``CommitRecord``."""
    return _sealed(struct.pack(f"<{len(words)}Q", *words))


def pack_head(head: Head) -> bytes:
    return pack_words(head.last, len(head.kept), *head.kept)


def first_records(store_id: bytes) -> dict[bytes, bytes]:
    """The records of a new file, by LMDB key."""
    packed = pack_store(store_id), pack_head(Head()), pack_words(*LogRecord())
    return dict(zip(map(item_key, (STORE_ITEM, HEAD_ITEM, LOG_ITEM)), packed, strict=True))


# A ValueError, or one of struct's, says what is wrong with a record.


def _unpack_words(data: bytes) -> list[int]:
    return [word for (word,) in struct.iter_unpack("<Q", _unsealed(data))]


def unpack_log(data: bytes) -> LogRecord:
    next_number, num_segments, numbers_hash = _unpack_words(data)
    return LogRecord(next_number, num_segments, numbers_hash)


def unpack_head(data: bytes) -> Head:
    last, count, *kept = _unpack_words(data)
    if len(kept) != count:
        raise ValueError("the record has the wrong length")
    if (kept and kept[0] == 0) or last > MAX_VERSION or kept != sorted(set(kept)) or max(kept, default=0) > last:
        raise ValueError("its versions are out of order")
    return Head(last, tuple(kept))


def unpack_commit(data: bytes) -> CommitRecord:
    version, payload_bytes, payload_checksum = _unpack_words(data)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {payload_bytes} bytes")
    return CommitRecord(version, payload_bytes, payload_checksum)


T = TypeVar("T")


def _read(tree: AnyTree, item: int, what: str, unpack: Callable[[bytes], T]) -> T:
    try:
        if (found := tree.get(item_key(item))) is None:
            raise ValueError("it is missing")
        return unpack(found)
    except (ValueError, struct.error) as error:
        raise FormatError(f"{tree.path}: {what} is damaged: {error}. {RESTORE}") from error


def check_store(tree: "Tree", store_id: bytes) -> LogRecord:
    """``require_logged`` of a file that is this store's. FormatError: it is another store's, or no store's."""
    from .segments import stored_segments  # whose kernels take a second to load

    if tree.get(item_key(STORE_ITEM)) is None:
        raise FormatError(f"{tree.path}: not a tierstore file (it has no store record). {RESTORE}")
    found = _read(tree, STORE_ITEM, "its store record", unpack_store)
    if found != store_id:
        raise FormatError(
            f"{tree.path}: belongs to store {found.hex()}, not to {store_id.hex()}: files of two stores were mixed. "
            f"{RESTORE}"
        )
    return require_logged(tree, stored_segments(tree))


def require_logged(tree: "Tree", stored: "Stored") -> LogRecord:
    """Compare the segments with what the writer counted: one that went missing is found here. FormatError: the record
    of the log is damaged. DamagedError: there are other segments than it counts."""
    from .segments import numbers_hash

    log = read_log(tree)
    if (len(stored), numbers_hash(stored)) != (log.num_segments, log.hash):
        raise DamagedError(
            f"{tree.path}: its tree has {len(stored):,} segments, and its record of the log counts "
            f"{log.num_segments:,} others. {RESTORE}"
        )
    return log


def read_log(tree: AnyTree) -> LogRecord:
    return _read(tree, LOG_ITEM, "its record of the log", unpack_log)


def read_head(tree: AnyTree) -> Head:
    return _read(tree, HEAD_ITEM, "its record of versions", unpack_head)


def read_record(tree: AnyTree, version: int) -> CommitRecord:
    """The commit record of a version that the head names; of version 0, an empty one."""
    if not version:
        return CommitRecord()
    what = f"the commit record of version {version}"
    record = _read(tree, version_item(version), what, unpack_commit)
    if record.version != version:
        raise FormatError(f"{tree.path}: {what} is damaged: it is of version {record.version}. {RESTORE}")
    return record


def stale_items(snapshot: "Tree", head: Head) -> list[int]:
    """Records and payload chunks of versions that the head does not name."""
    versions = {item: item >> _ITEM_BITS for item in snapshot.walk(META_KEY)["number"].tolist()}
    return [item for item, version in versions.items() if version and version not in head.kept]


def read_payload(snapshot: AnyTree, record: CommitRecord) -> bytes:
    """What a version was committed with. ChecksumError: it is not what was written."""
    buffer = BytesIO()  # gives what it holds without a copy
    for chunk in range(record.num_payload_chunks):
        buffer.write(snapshot.get(item_key(version_item(record.version, chunk))) or b"")
    payload = buffer.getvalue()
    if len(payload) != record.payload_bytes or (payload and bytes_checksum(payload) != record.payload_checksum):
        raise ChecksumError(f"{snapshot.path}: the payload of version {record.version} is damaged. {RESTORE}")
    return payload
