"""A store's rows without the store: their cold tier alone, from which rows are copied and to which they are."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..io import LmdbColdTier
from ..io.files import rows_path
from ..rows import RowLayout
from ..store.manifest import Manifest

Shapes = dict[int, tuple[RowLayout, int]]


def shapes_of(manifest: Manifest) -> Shapes:
    """Layout and number of rows of each table, by its index."""
    layouts = (config.layout(manifest.page_bytes) for config in manifest.tables)
    return dict(enumerate(zip(layouts, (config.num_embeddings for config in manifest.tables), strict=True)))


def add_tables(tier: LmdbColdTier, manifest: Manifest) -> None:
    """Make the store's tables known."""
    for index, shape in shapes_of(manifest).items():
        tier.add_table(index, *shape)


@contextlib.contextmanager
def new_tier(work: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    """A row file to be written, with the store's tables; synced at the end of the block, so that it needs no anchor."""
    tier = LmdbColdTier(work, store_id=bytes.fromhex(manifest.store_id), readonly=False)
    with contextlib.closing(tier):
        add_tables(tier, manifest)
        yield tier
    with rows_path(work).open("rb") as file:
        os.fsync(file.fileno())


def bytes_on_device(directory: Path) -> int:
    """Room that a store's row file takes."""
    return rows_path(directory).stat().st_blocks * 512
