"""Ranges of a table's rows with their optimizer state, read and written through its cache."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int64s, Weights
from ..layout import KEY_ROW_BITS, MAX_ROWS
from ..store import Table

CHUNK_BYTES: Final = 8 * 2**20
"""Rows, state and bookkeeping of one chunk. An export or import holds at most eight times this besides ``ddr``."""
_BOOKKEEPING_BYTES: Final = 64
"""Keys, slots and unique numbers of a row on its way through the cache."""


class RowValues(NamedTuple):
    weights: Weights
    """float32 or uint16 (the bits of a 16-bit type) [n, dim], or uint8 (quantized) [n, stored columns]."""
    state: Floats
    """float32 [n, state_dim]."""


def chunks(table: Table, end: int = MAX_ROWS) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of rows that make about ``CHUNK_BYTES``, all that the store uses before ``end`` in their
    order."""
    rows, step = table.rows, max(1, CHUNK_BYTES // (table.layout.row_bytes + _BOOKKEEPING_BYTES))
    end = min(end, rows.stop)
    for start in range(rows.start, end, step):
        yield start, min(start + step, end)


def numbered(table: Table, start: int, stop: int) -> Int64s:
    """int64 [stop - start]: keys of the rows ``[start, stop)``."""
    return np.arange(start, stop, dtype=np.int64) | (table.index << KEY_ROW_BITS)


def read_rows(table: Table, start: int, stop: int) -> RowValues:
    """Rows ``[start, stop)``; as ``read_keys``."""
    return read_keys(table, numbered(table, start, stop))


def read_keys(table: Table, keys: Int64s) -> RowValues:
    """Rows of a table by key, bits unchanged; rows never written have their first values. ChecksumError,
    ClosedError."""
    table.store.require_open()
    pool, layout = table.pool, table.layout
    pool.tier.flush()
    weights = np.empty((len(keys), layout.stored_columns), layout.numpy_dtype)
    state = np.empty((len(keys), layout.state_dim), np.float32)
    for first, lease in pool.leases.parts(keys):
        part = slice(first, first + lease.num_positions)
        with pool.arena.lock:
            kernels.copy_rows_out(lease.position_slots, pool.arena.weights, layout.stored_columns, weights[part])
            kernels.copy_rows_out(lease.position_slots, pool.arena.state, layout.state_dim, state[part])
    return RowValues(weights, state)


def write_rows(table: Table, start: int, weights: Weights, state: Floats | None) -> int:
    """Overwrite rows from ``start`` on; as ``write_keys``."""
    return write_keys(table, numbered(table, start, start + len(weights)), weights, state)


def write_keys(table: Table, keys: Int64s, weights: Weights, state: Floats | None) -> int:
    """Overwrite rows of a table by key, distinct; returns how many had other bits before. A ``state`` of None keeps
    what there is. A row that has these very bits already is left alone. ReadOnlyError, ClosedError, DiskFullError."""
    table.store.require_writable()
    pool, layout = table.pool, table.layout
    with pool.tier.emptied():
        before = read_keys(table, keys)
        state = before.state if state is None else state
        bits = np.uint16 if weights.dtype == np.uint16 else np.uint32
        differ = (before.weights.view(bits) != weights.view(bits)).any(axis=1)
        differ |= (before.state.view(np.uint32) != state.view(np.uint32)).any(axis=1)
        changed = np.flatnonzero(differ)
        weights, state = weights[changed], state[changed]
        table.note_change()
        for first, lease in pool.leases.parts(keys[changed]):
            part = slice(first, first + lease.num_positions)
            with pool.arena.lock:
                pool.writeback.begin_update(lease.slots)
                kernels.copy_rows_in(lease.position_slots, weights[part], pool.arena.weights, layout.dim)
                kernels.copy_rows_in(lease.position_slots, state[part], pool.arena.state, layout.state_dim)
    return len(changed)
