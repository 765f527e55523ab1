"""The small records beside the blocks: which store this is, which versions it shows, and what each consists of.

Each ends in the XXH64 of what comes before. Integers are little-endian uint64. docs/format.md draws them.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .btree import META_KEY
from .checksum import bytes_checksum

__all__ = [
    "HEAD_ITEM",
    "MAX_VERSION",
    "PAYLOAD_CHUNK_BYTES",
    "PLACEMENT_COPIES",
    "PLACEMENT_MAGIC",
    "STORE_ITEM",
    "CommitRecord",
    "Head",
    "StoreRecord",
    "TableTotals",
    "block_key_bytes",
    "commit_item",
    "first_records",
    "item_key",
    "pack_commit",
    "pack_head",
    "pack_store",
    "payload_item",
    "placement_chunk_bytes",
    "placement_item",
    "unpack_commit",
    "unpack_head",
    "unpack_placement_chunk",
    "unpack_store",
    "version_of_item",
]

STORE_ITEM: Final = 0
HEAD_ITEM: Final = 1
_ITEM_BITS: Final = 24
"""Of an item's number, for its place among the items of its version."""
MAX_VERSION: Final = (1 << 40) - 1
PAYLOAD_CHUNK_BYTES: Final = (1 << 20) - 16
"""A payload is cut into chunks: long runs of free pages are hard to find in a file that has been in use for a while."""

MAX_PAYLOAD_BYTES: Final = ((1 << _ITEM_BITS) - 1) * PAYLOAD_CHUNK_BYTES

PLACEMENT_COPIES: Final = 2
_FIRST_PLACEMENT_ITEM: Final = 2
PLACEMENT_MAGIC: Final = b"tierplac"
_PLACEMENT_HEAD_BYTES: Final = 24
PLACEMENT_CHUNK_BYTES: Final = PAYLOAD_CHUNK_BYTES - _PLACEMENT_HEAD_BYTES - 8
_MIN_PLACEMENT_BYTES: Final = 1 << 14
"""So long that LMDB gives it pages of its own, where it can be found without the tree."""
_MAX_PLACEMENT_BYTES: Final = ((1 << _ITEM_BITS) - _FIRST_PLACEMENT_ITEM) // PLACEMENT_COPIES * PLACEMENT_CHUNK_BYTES

_MAGIC: Final = b"tierrows"
_FORMAT: Final = 2
_PLACED_FORMAT: Final = 3
"""Of a file whose rows lie as a placement says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecord:
    """Which store the file is of, and how long its placement is; 0 bytes: rows lie at their own places."""

    store_id: bytes
    placement_bytes: int = 0
    placement_checksum: int = 0

    @property
    def num_placement_chunks(self) -> int:
        return -(-self.placement_bytes // PLACEMENT_CHUNK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Of one table in one version."""

    num_blocks: int = 0
    hash: int = 0
    """Sum of ``checksum.mix_key`` over its (block key, epoch) pairs, modulo 2**64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Which versions the file shows."""

    last: int = 0
    """The highest number that was ever given to a version; numbers are not used again, not after a rollback either."""
    kept: tuple[int, ...] = ()
    """Ascending; the last one is the current version. Empty before the first commit."""

    @property
    def current(self) -> int:
        return self.kept[-1] if self.kept else 0

    @property
    def oldest(self) -> int:
        return self.kept[0] if self.kept else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    version: int = 0
    payload_bytes: int = 0
    payload_checksum: int = 0
    tables: dict[int, TableTotals]
    """By table index; tables without a block are left out."""

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


def placement_item(chunk: int, copy: int) -> int:
    """Number of a chunk of the placement."""
    return _FIRST_PLACEMENT_ITEM + PLACEMENT_COPIES * chunk + copy


def block_key_bytes(block_keys: NDArray[np.uint64], epochs: NDArray[np.uint64]) -> bytes:
    """The LMDB keys of blocks, 16 bytes each, end to end."""
    pairs = np.empty((len(block_keys), 2), ">u8")
    pairs[:, 0] = block_keys
    pairs[:, 1] = epochs
    return pairs.tobytes()


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


def pack_store(store_id: bytes, placement: bytes = b"") -> bytes:
    head = struct.pack("<8sQ16s", _MAGIC, _PLACED_FORMAT if placement else _FORMAT, store_id)
    return _sealed(head + struct.pack("<QQ", len(placement), bytes_checksum(placement)) if placement else head)


def unpack_store(data: bytes) -> StoreRecord:
    """ValueError or struct.error say what is wrong."""
    body = _unsealed(data)
    magic, version, store_id = struct.unpack_from("<8sQ16s", body)
    if magic != _MAGIC:
        raise ValueError("the record is not a tierstore record")
    if version not in (_FORMAT, _PLACED_FORMAT):
        raise ValueError(f"format version {version}; this release reads versions {_FORMAT} and {_PLACED_FORMAT}")
    size, checksum = struct.unpack("<QQ", body[32:]) if version == _PLACED_FORMAT else (0, 0)
    if (version == _PLACED_FORMAT) != bool(size) or size > _MAX_PLACEMENT_BYTES:
        raise ValueError(f"a placement of {size} bytes")
    return StoreRecord(store_id=bytes(store_id), placement_bytes=size, placement_checksum=checksum)


def _placement_items(placement: bytes) -> dict[int, bytes]:
    """The items that hold a placement, each copy of each chunk."""
    starts = range(0, len(placement), PLACEMENT_CHUNK_BYTES)
    chunks = [_pack_placement_chunk(i, placement[at : at + PLACEMENT_CHUNK_BYTES]) for i, at in enumerate(starts)]
    return {placement_item(i, copy): chunk for i, chunk in enumerate(chunks) for copy in range(PLACEMENT_COPIES)}


def _pack_placement_chunk(chunk: int, data: bytes) -> bytes:
    return _sealed((struct.pack("<8sQQ", PLACEMENT_MAGIC, chunk, len(data)) + data).ljust(_MIN_PLACEMENT_BYTES, b"\0"))


def placement_chunk_bytes(data: bytes) -> int:
    """Length of a chunk of the placement, of which these are the first bytes."""
    size: int = struct.unpack_from("<8sQQ", data)[2]
    return max(_MIN_PLACEMENT_BYTES, _PLACEMENT_HEAD_BYTES + min(size, PLACEMENT_CHUNK_BYTES)) + 8


def first_records(store_id: bytes, placement: bytes = b"") -> dict[bytes, bytes]:
    """The records of a new file, by LMDB key."""
    items = {STORE_ITEM: pack_store(store_id, placement), HEAD_ITEM: pack_head(Head())} | _placement_items(placement)
    return {item_key(item): record for item, record in items.items()}


def unpack_placement_chunk(data: bytes, chunk: int = 0) -> bytes:
    """ValueError or struct.error say what is wrong."""
    body = _unsealed(data)
    magic, number, size = struct.unpack_from("<8sQQ", body)
    if magic != PLACEMENT_MAGIC or number != chunk:
        raise ValueError(f"it is chunk {number}")
    return body[_PLACEMENT_HEAD_BYTES : _PLACEMENT_HEAD_BYTES + size]


def pack_head(head: Head) -> bytes:
    return _sealed(struct.pack(f"<QQ{len(head.kept)}Q", head.last, len(head.kept), *head.kept))


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


def pack_commit(record: CommitRecord) -> bytes:
    head = struct.pack("<QQQQ", record.version, record.payload_bytes, record.payload_checksum, len(record.tables))
    rows = [
        struct.pack("<QQQ", index, totals.num_blocks, totals.hash) for index, totals in sorted(record.tables.items())
    ]
    return _sealed(head + b"".join(rows))


def unpack_commit(data: bytes) -> CommitRecord:
    """ValueError says what is wrong."""
    body = _unsealed(data)
    version, payload_bytes, payload_checksum, num_tables = struct.unpack_from("<QQQQ", body)
    if len(body) != 32 + 24 * num_tables:
        raise ValueError("the record has the wrong length")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {payload_bytes} bytes")
    tables = {
        index: TableTotals(num_blocks=num_blocks, hash=total)
        for index, num_blocks, total in struct.iter_unpack("<QQQ", body[32:])
    }
    return CommitRecord(version=version, payload_bytes=payload_bytes, payload_checksum=payload_checksum, tables=tables)
