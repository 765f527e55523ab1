"""What the segments of a store hold, read from their indexes."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.segments import KEYS, Stored, read_indexes, stored_segments
from tierstore.layout import KEY_ROW_BITS, PAGE_HEADER_WORDS, RowLayout
from tierstore.store.manifest import Manifest

__all__ = ["StoredKeys", "offset_of", "segment_offset", "segments_of"]

Int64s = NDArray[np.int64]


class StoredKeys(NamedTuple):
    """Of one store."""

    segments: Stored
    keys: list[Int64s]  # int64 [rows], segment by segment in ascending order of their numbers
    layouts: list[RowLayout]
    file_pages: int

    def of_layout(self, layout: RowLayout) -> Int64s:
        """All keys of a layout, in the order in which they lie in the file."""
        own = [keys for keys, each in zip(self.keys, self.layouts, strict=True) if each == layout]
        return np.concatenate([np.empty(0, np.int64), *own])

    def partial(self) -> list[RowLayout]:
        """The layouts of segments that are not full."""
        return [each for keys, each in zip(self.keys, self.layouts, strict=True) if len(keys) < each.rows_per_segment]


def segments_of(directory: Path) -> StoredKeys:
    manifest = Manifest.read(directory)
    tier = LmdbColdTier(directory, store_id=bytes.fromhex(manifest.store_id), readonly=True)
    with contextlib.closing(tier), tier.lease_tree() as snapshot:
        segments = read_indexes(snapshot, stored_segments(snapshot))
        starts = segments["first_page"] * manifest.page_bytes // 8 + PAGE_HEADER_WORDS + KEYS
        words = snapshot.file_map.words
        keys = [
            words[at : at + n].astype(np.int64)
            for at, n in zip(starts.tolist(), segments["rows"].tolist(), strict=True)
        ]
        layouts = [manifest.tables[own[0] >> KEY_ROW_BITS].layout(manifest.page_bytes) for own in keys]
        return StoredKeys(segments, keys, layouts, snapshot.limit_pages())


def segment_offset(directory: Path) -> int:
    """Where in the file the newest segment begins, in bytes."""
    return int(segments_of(directory).segments["first_page"][-1]) * Manifest.read(directory).page_bytes


def offset_of(directory: Path, table: int, row: int, version: int | None = None) -> int:
    """Where in the file the weights of a row begin, as a version shows it, in bytes."""
    manifest = Manifest.read(directory)
    tier = LmdbColdTier(directory, store_id=bytes.fromhex(manifest.store_id), readonly=True, version=version)
    with contextlib.closing(tier):
        tier.set_tables(manifest.shapes)
        with tier.lease() as (_, rows):
            segments = rows.segments[rows.layouts[table]]
            slot, index = divmod(int(rows.places[rows.tables.bases[table] + row]), 1 << segments.geo.place_bits)
            block, place = divmod(index, segments.geo.rows_per_block)
            page = int(segments.arrays.data_pages[slot]) + block * segments.geo.pages_per_block
            return page * manifest.page_bytes + 8 * (segments.geo.first_row + place * segments.geo.row_stride)
