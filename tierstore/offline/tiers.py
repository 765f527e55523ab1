"""A store's rows without the store: their cold tier alone, from which rows are copied and to which they are."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..io import LmdbColdTier
from ..io.files import rows_path
from ..store.manifest import Manifest


@contextlib.contextmanager
def new_tier(work: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    """A row file to be written, with the store's tables; synced at the end of the block, so that it needs no anchor."""
    tier = LmdbColdTier(work, store_id=bytes.fromhex(manifest.store_id), readonly=False)
    with contextlib.closing(tier):
        manifest.add_tables(tier)
        yield tier
    with rows_path(work).open("rb") as file:
        os.fsync(file.fileno())


def bytes_on_device(directory: Path) -> int:
    """Bytes that a store's row file takes on the device."""
    return rows_path(directory).stat().st_blocks * 512
