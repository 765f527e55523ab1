"""Opening tiers, and getting at the file behind their back."""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import xxhash

from tests.conformance.cold_tier import add_tables
from tierstore.io.files import SUPERBLOCK_NAME
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.sigbus import Guard
from tierstore.layout import BLOCK_HEADER_WORDS
from tierstore.system.page_cache import _libc

STORE_ID = bytes(range(16))


def open_tier(path: Path, **changes: Any) -> LmdbColdTier:
    settings: dict[str, Any] = {"store_id": STORE_ID, "readonly": False} | changes
    return LmdbColdTier(path, **settings)


def opened(path: Path, **changes: Any) -> LmdbColdTier:
    tier = open_tier(path, **changes)
    add_tables(tier)
    return tier


@contextmanager
def plain_lmdb(path: Path, *, write: bool = False) -> "Iterator[lmdb.Transaction[bytes]]":
    """The file by py-lmdb alone. What is written stays: there is no anchor that an open would go back to."""
    if write:
        (path / SUPERBLOCK_NAME).unlink(missing_ok=True)
    file = path / "rows.lmdb"
    environment = lmdb.open(str(file), subdir=False, map_size=1 << 30, lib_version=0, readonly=not write)
    try:
        with environment.begin(write=write) as txn:
            yield txn
    finally:
        environment.close()


class RowPlace(NamedTuple):
    """Where a row lies: its segment's number, the row's in it, first pages of the segment and of the block, and the
    bytes of the file where its key, which the checksum follows, and its payload begin."""

    number: int
    index: int
    segment_page: int
    block_page: int
    pair: int
    row: int


def place_of(tier: LmdbColdTier, table: int, row: int) -> RowPlace:
    with tier.lease() as (_, rows):
        segments = rows.segments[rows.layouts[table]]
        geo, place = segments.geo, int(rows.places[int(rows.tables.bases[table]) + row])
        slot, index = place >> geo.place_bits, place % (1 << geo.place_bits)
        block, in_block = divmod(index, geo.rows_per_block)
        block_page = int(segments.arrays.data_pages[slot]) + block * geo.pages_per_block
        words = block_page * geo.page_words
        return RowPlace(
            number=int(segments.arrays.numbers[slot]),
            index=index,
            segment_page=int(segments.stored(np.array([slot]))["first_page"][0]),
            block_page=block_page,
            pair=8 * (words + BLOCK_HEADER_WORDS + in_block * geo.pair_stride),
            row=8 * (words + geo.first_row + in_block * geo.row_stride),
        )


def page_of(tier: LmdbColdTier, table: int, block: int) -> int:
    with tier.lease() as (_, rows):
        rows_per_block = rows.layouts[table].rows_per_block
    return place_of(tier, table, block * rows_per_block).block_page


def refuse(guarded: Guard, page: int, count: int = 1) -> None:
    """Have these pages of a map fault, until the guard maps the file there again."""
    empty = os.memfd_create("empty")
    address = guarded._address + page * mmap.PAGESIZE
    read, shared_fixed = 1, 0x01 | 0x10
    assert _libc.mmap(address, count * mmap.PAGESIZE, read, shared_fixed, empty, 0) == address
    os.close(empty)


def heal(guarded: Guard, pages: int) -> None:
    guarded._put_back(guarded._address, 0, pages * mmap.PAGESIZE)


def flip(path: Path, offset: int, bits: int = 1) -> None:
    with (path / "rows.lmdb").open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ bits]))


def rows_format(files: dict[str, bytes], version: int) -> dict[str, bytes]:
    data = bytearray(files["rows.lmdb"])
    at, found = data.find(b"tierrows"), 0
    while at >= 0:
        record = bytes(data[at : at + 8]) + version.to_bytes(8, "little") + bytes(data[at + 16 : at + 32])
        data[at : at + 40] = record + xxhash.xxh64_intdigest(record).to_bytes(8, "little")
        at, found = data.find(b"tierrows", at + 8), found + 1
    assert found
    return files | {"rows.lmdb": bytes(data)}


def manifest_format(files: dict[str, bytes], version: int) -> dict[str, bytes]:
    body = json.loads(files["manifest.json"])["body"] | {"format_version": version}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return files | {"manifest.json": json.dumps({"body": body, "sha256": digest}).encode()}
