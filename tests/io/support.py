"""Opening tiers, and getting at the file behind their back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from tierstore.io.anchor import ANCHOR_NAME
from tierstore.io.files import map_bytes
from tierstore.io.lmdb import LmdbColdTier

STORE_ID = bytes(range(16))


def open_tier(path: Path, **changes: Any) -> LmdbColdTier:
    settings: dict[str, Any] = {"store_id": STORE_ID, "readonly": False} | changes
    return LmdbColdTier(path, **settings)


@contextmanager
def plain_lmdb(path: Path, *, write: bool = False) -> "Iterator[lmdb.Transaction[bytes]]":
    """The file by py-lmdb alone. What is written stays: there is no anchor that an open would go back to."""
    if write:
        (path / ANCHOR_NAME).unlink(missing_ok=True)
    environment = lmdb.open(
        str(path / "rows.lmdb"), subdir=False, map_size=map_bytes(path), lib_version=0, readonly=not write
    )
    try:
        with environment.begin(write=write) as txn:
            yield txn
    finally:
        environment.close()


def page_of(tier: LmdbColdTier, table: int, block: int) -> int:
    """Where a block lies."""
    with tier.lease() as (_, directory):
        return int(directory.pages[int(directory.tables.bases[table]) + block])


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change one byte of the rows file."""
    with (path / "rows.lmdb").open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ bits]))
