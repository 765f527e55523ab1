"""What the segments of a store hold, read from their indexes."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import tierstore
from tests.io.support import place_of
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.segments import KEYS, Stored, read_indexes, stored_segments
from tierstore.layout import KEY_ROW_BITS, PAGE_HEADER_WORDS, RowLayout
from tierstore.store.manifest import Manifest

Int64s = NDArray[np.int64]


class StoredKeys(NamedTuple):
    segments: Stored
    keys: list[Int64s]  # int64 [rows], segment by segment in ascending order of their numbers
    layouts: list[RowLayout]

    def of_layout(self, layout: RowLayout) -> Int64s:
        own = [keys for keys, each in zip(self.keys, self.layouts, strict=True) if each == layout]
        return np.concatenate([np.empty(0, np.int64), *own])

    def partial(self) -> list[RowLayout]:
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
        return StoredKeys(segments, keys, layouts)


def segment_offset(directory: Path) -> int:
    return int(segments_of(directory).segments["first_page"][-1]) * Manifest.read(directory).page_bytes


def offset_of(directory: Path, table: int, row: int, version: int | None = None) -> int:
    """Where in the file the weights of a row begin, as a version shows it, in bytes."""
    with tierstore.open(directory, mode="r", version=version, ddr="8MiB") as store:
        return place_of(store._cold, table, row).row  # type: ignore[arg-type]
