"""py-lmdb used plainly: one key for each row, read with getmulti."""

from pathlib import Path

import lmdb
import numpy as np

from ..rowdata import Floats, Int64s, Rows, build_once

__all__ = ["LmdbRows"]

_BATCH_ROWS = 50_000


def _keys(ids: Int64s) -> list[bytes]:
    raw = ids.astype(">u8").tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


class LmdbRows:
    """Rows of float32 under eight-byte keys in ascending order."""

    def __init__(self, parent: Path, rows: Rows) -> None:
        self._rows = rows
        folder = build_once(parent, "lmdb-rows", rows, self._build)
        self.path = folder / "data.mdb"
        self._environment = self._open(folder, readonly=True)

    def _open(self, folder: Path, *, readonly: bool) -> lmdb.Environment:
        map_bytes = 2 * self._rows.count * (self._rows.dim * 4 + 64) + (1 << 24)
        return lmdb.open(
            str(folder), map_size=map_bytes, readonly=readonly, lock=False, readahead=False, sync=False, metasync=False
        )

    def _build(self, folder: Path) -> None:
        environment = self._open(folder, readonly=False)
        for start, chunk in self._rows.chunks():
            for first in range(0, len(chunk), _BATCH_ROWS):
                part = chunk[first : first + _BATCH_ROWS]
                keys = _keys(np.arange(start + first, start + first + len(part)))
                with environment.begin(write=True) as transaction:
                    cursor = transaction.cursor()
                    cursor.putmulti(zip(keys, (row.tobytes() for row in part), strict=True), append=True)
        environment.sync(True)
        environment.close()

    def read(self, ids: Int64s) -> Floats:
        """float32 [n, dim], in ascending order of id (getmulti answers in the order of the keys)."""
        with self._environment.begin(buffers=True) as transaction:
            found = transaction.cursor().getmulti(_keys(np.sort(ids)))
            return np.stack([np.frombuffer(value, np.float32) for _, value in found])

    def close(self) -> None:
        self._environment.close()
