"""The order in which rows of one file are appended to another, in batches that fill whole segments."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS, RowLayout
from .reads import RowReader, StoredRows
from .row_map import RowMap
from .snapshot import Snapshot

__all__ = ["by_key", "some_first", "stored_batches"]

Int64s = NDArray[np.int64]

_LIST_STEP: Final = 1 << 20


def by_key(rows: RowMap, tables: Iterable[int], since: int = 0) -> Iterator[Int64s]:
    """Keys of the stored rows of some tables, table by table, ascending, in parts; ``since`` as for
    ``RowMap.stored_rows``."""
    for table in tables:
        _, num_rows = rows.shapes[table]
        for first in range(0, num_rows, _LIST_STEP):
            stop = min(first + _LIST_STEP, num_rows)
            yield rows.stored_rows(table, first, stop, since) | (table << KEY_ROW_BITS)


def some_first(rows: RowMap, layout: RowLayout, leading: Int64s, since: int = 0) -> Iterator[Int64s]:
    """Keys of the stored rows of a layout, in parts: the leading ones in their order, then the others by key.

    Args:
        leading: int64 [n], distinct keys.
    """
    for first in range(0, len(leading), _LIST_STEP):
        part = leading[first : first + _LIST_STEP]
        yield part[rows.is_stored(layout, part, since)]
    known = np.sort(leading)
    for part in by_key(rows, (table for table, own in rows.layouts.items() if own == layout), since):
        first, stop = np.searchsorted(known, part[[0, -1]] + [0, 1]) if len(part) else (0, 0)
        yield part[np.isin(part, known[first:stop], assume_unique=True, invert=True)]


def stored_batches(snapshot: Snapshot, rows: RowMap, parts: Iterable[Int64s], size: int) -> Iterator[StoredRows]:
    """Stored rows of one layout, in the order of their keys, ``size`` at a time; the last batch is what is left.

    Raises:
        ChecksumError, TruncatedError, UnreadableError: a row is damaged; names it.
    """
    reader = RowReader(snapshot.file_map.rows, verify=True)
    for keys in _batches(parts, size):
        yield reader.stored(snapshot, rows, keys)


def _batches(parts: Iterable[Int64s], size: int) -> Iterator[Int64s]:
    waiting = np.empty(0, np.int64)
    for part in parts:
        waiting = np.concatenate([waiting, part])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if len(waiting):
        yield waiting
