"""Which rows a run looks up, without training it."""

import numpy as np

from ..kernels.arrays import Int64s
from ..trace import TableTrace, Trace
from .build import open_data
from .config import RunConfig


def trace_run(config: RunConfig, *, rows: int | None = None) -> Trace:
    """The lookups of one epoch: those of the training rows, or of as many from the start, in their order. 16 bytes
    of memory a lookup, and more. ValueError if the data cannot be read, or has no such rows."""
    reader, hasher = open_data(config)
    stop = config.data.train_rows or None if rows is None else rows
    if stop is not None and stop < 1:
        raise ValueError(f"rows={rows}: a trace is of one row at least")
    names = config.data.sparse_columns
    ids: dict[str, list[Int64s]] = {name: [] for name in names}
    lengths: dict[str, list[Int64s]] = {name: [] for name in names}
    batch_size = config.train.batch_size
    for batch in reader.batches(hasher, batch_size=batch_size, stop_row=stop):
        values, offsets = batch.sparse.values().numpy(), batch.sparse.offsets().numpy()
        for column, name in enumerate(names):
            own = offsets[column * len(batch) : (column + 1) * len(batch) + 1]
            ids[name].append(values[own[0] : own[-1]])
            lengths[name].append(np.diff(own))
    nothing = np.empty(0, np.int64)
    tables = {
        name: TableTrace(
            np.concatenate([nothing, *ids[name]]), np.append(0, np.cumsum(np.concatenate([nothing, *lengths[name]])))
        )
        for name in names
    }
    return Trace(tables=tables, batch_samples=batch_size)
