"""The parts of a read: one gather through the map of places, repeated if the file grew meanwhile."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS
from .gather import GatherStatus, Scratch, gather, gather_error, new_scratch, seen_words
from .mapped import FileMap
from .row_map import Places, RowMap
from .segments import Geometry
from .slots import Segments
from .snapshot import Snapshot

__all__ = ["RowReader", "StoredRows"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]


class StoredRows(NamedTuple):
    """Rows of one layout, as they are stored.

    Attributes:
        keys: int64 [n].
        slots: int32 [n], from 0 on.
        weights, state: uint64 [n, words].
        pages: that they are on.
    """

    keys: Int64s
    slots: Int32s
    weights: Words
    state: Words
    pages: int


class RowReader:
    """Gathers rows from a file, and remembers whether its pages were in memory the last time.

    Args:
        file_map: rows are read through; a map of its own, so that pages of rows that cannot be read are nobody else's
            trouble.
        verify: compare each row with its checksum.

    Attributes:
        is_cold: pages were not in memory the last time.
    """

    def __init__(self, file_map: FileMap, *, verify: bool) -> None:
        self._file_map = file_map
        self._verify = verify
        self.is_cold = False
        self._can_sample = file_map.tells_residency()

    def stored(self, snapshot: Snapshot, rows: RowMap, keys: Int64s) -> StoredRows:
        """Rows of one layout that were written; at least one.

        Raises:
            ChecksumError, TruncatedError, UnreadableError: a row is damaged; names it.
        """
        layout, count = rows.layouts[int(keys[0]) >> KEY_ROW_BITS], len(keys)
        weights, state = (np.empty((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
        slots, present = np.arange(count, dtype=np.int32), np.empty(count, np.bool_)
        positions = rows.positions(layout, keys)
        segments = rows.segments[layout]
        result = self.gather(snapshot, segments, rows.places, positions, keys, slots, weights, state, present)
        if result[0] != GatherStatus.DONE:
            raise gather_error(snapshot.path, result, keys)
        assert present.all(), "a row of the map was not read"
        return StoredRows(keys, slots, weights, state, int(result[2]))

    def gather(
        self,
        snapshot: Snapshot,
        segments: Segments,
        places: Places,
        positions: Int64s,
        keys: Int64s,
        slots: Int32s,
        weights: Words,
        state: Words,
        present: NDArray[np.bool_],
    ) -> Int64s:
        """See ``gather.gather`` for arguments and result."""
        file_map, geo = self._file_map, segments.geo
        scratch = new_scratch(len(keys))
        limit, arrays = snapshot.limit_pages(), segments.arrays
        since = file_map.guard.begin()
        while True:
            result = np.zeros(4, np.int64)
            gather(
                geo,
                file_map.words,
                file_map.address,
                limit,
                positions,
                places,
                arrays,
                keys,
                slots,
                weights.reshape(-1),
                state.reshape(-1),
                present,
                scratch,
                np.zeros(seen_words(geo, limit, len(keys)), np.uint32),
                np.empty(8, np.uint64),
                np.empty(2, np.int64),
                np.empty(1, np.uint8),
                self._verify,
                self.is_cold,
                self._can_sample,
                result,
            )
            if result[0] != GatherStatus.OUT_OF_FILE:
                self.is_cold = bool(result[3])
                if not file_map.guard.is_clean(since):
                    self._look_for_refused(since, geo, scratch, result)
                return result
            # A place entered while we read may lie in what the file, or the list of segments, grew by meanwhile.
            known, limit, arrays = (limit, len(arrays.numbers)), snapshot.limit_pages(), segments.arrays
            if (limit, len(arrays.numbers)) == known:
                return result

    def _look_for_refused(self, since: int, geo: Geometry, scratch: Scratch, result: Int64s) -> None:
        """Have the result say so if a row lies on a page that was refused since, whatever was found there."""
        guard = self._file_map.guard
        refused = guard.refused(since)
        starts, stops = scratch.pairs * 8, (scratch.offsets + geo.row_words) * 8
        met = refused.meet(starts, stops) & (scratch.offsets != 0)
        if met.any():
            is_cut = guard.is_cut_short(refused)
            result[0] = GatherStatus.OUT_OF_FILE if is_cut else GatherStatus.UNREADABLE
            result[1] = int(np.argmax(met))
