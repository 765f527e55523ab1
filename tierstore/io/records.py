"""The small records beside the blocks: which store this is, and what the current version consists of.

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
    "COMMIT_ITEM",
    "PAYLOAD_CHUNK_BYTES",
    "STORE_ITEM",
    "CommitRecord",
    "TableTotals",
    "block_key_bytes",
    "item_key",
    "pack_commit",
    "pack_store",
    "payload_item",
    "unpack_commit",
    "unpack_store",
]

STORE_ITEM: Final = 0
COMMIT_ITEM: Final = 1
_FIRST_PAYLOAD_ITEM: Final = 1 << 32
PAYLOAD_CHUNK_BYTES: Final = (1 << 20) - 16
"""A payload is cut into chunks: long runs of free pages are hard to find in a file that has been in use for a while."""

_MAGIC: Final = b"tierrows"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTotals:
    """Of one table in one version."""

    num_blocks: int = 0
    hash: int = 0
    """Sum of ``checksum.mix_key`` over its (block key, epoch) pairs, modulo 2**64."""


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


def payload_item(chunk: int) -> int:
    return _FIRST_PAYLOAD_ITEM + chunk


def block_key_bytes(block_keys: NDArray[np.uint64], epochs: NDArray[np.uint64]) -> bytes:
    """The LMDB keys of blocks, 16 bytes each, end to end."""
    pairs = np.empty((len(block_keys), 2), ">u8")
    pairs[:, 0] = block_keys
    pairs[:, 1] = epochs
    return pairs.tobytes()


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
    """The store's id; ValueError says what is wrong."""
    magic, version, store_id = struct.unpack("<8sQ16s", _unsealed(data))
    if magic != _MAGIC:
        raise ValueError("the record is not a tierstore record")
    if version != _FORMAT:
        raise ValueError(f"format version {version}; this release reads version {_FORMAT}")
    return bytes(store_id)


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
    tables = {
        index: TableTotals(num_blocks=num_blocks, hash=total)
        for index, num_blocks, total in struct.iter_unpack("<QQQ", body[32:])
    }
    return CommitRecord(version=version, payload_bytes=payload_bytes, payload_checksum=payload_checksum, tables=tables)
