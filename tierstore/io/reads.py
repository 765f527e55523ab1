"""The parts of a read: one gather through the directory, repeated if the file grew meanwhile."""

import numpy as np
from numpy.typing import NDArray

from .directory import Directory
from .gather import GatherStatus, Geometry, gather, seen_words
from .mapped import FileMap
from .snapshot import Snapshot

__all__ = ["RowReader"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]


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

    def gather(
        self,
        snapshot: Snapshot,
        directory: Directory,
        geo: Geometry,
        keys: Int64s,
        slots: Int32s,
        weights: Words,
        state: Words,
        present: NDArray[np.bool_],
    ) -> Int64s:
        """See ``gather.gather`` for arguments and result."""
        file_map = self._file_map
        offsets = np.empty(len(keys), np.int64)
        limit = snapshot.limit_pages()
        since = file_map.guard.begin()
        while True:
            result = np.zeros(4, np.int64)
            gather(
                geo,
                file_map.words,
                file_map.address,
                limit,
                directory.tables,
                directory.pages,
                keys,
                slots,
                weights.reshape(-1),
                state.reshape(-1),
                present,
                offsets,
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
                if not file_map.guard.is_clean(since) and result[0] != GatherStatus.BAD_KEY:
                    self._look_for_refused(since, geo, offsets, result)
                return result
            # An entry published while we read may lie in what the file grew by meanwhile.
            known, limit = limit, snapshot.limit_pages()
            if limit <= known:
                return result

    def _look_for_refused(self, since: int, geo: Geometry, offsets: Int64s, result: Int64s) -> None:
        """Have the result say so if a row lies on a page that was refused since, whatever was found there."""
        guard = self._file_map.guard
        refused = guard.refused(since)
        starts, stops = offsets * 8, (offsets + geo.row_words + 1) * 8
        if geo.pages_per_block == 1:  # the page's header is looked at too
            starts -= starts % (geo.page_words * 8)
        met = refused.meet(starts, stops) & (offsets != 0)
        if met.any():
            is_cut = guard.is_cut_short(refused)
            result[0] = GatherStatus.OUT_OF_FILE if is_cut else GatherStatus.UNREADABLE
            result[1] = int(np.argmax(met))
