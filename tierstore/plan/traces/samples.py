"""Accesses as the samples of a trace: the same rows in the same order and batches."""

from typing import Final

import numpy as np

from ...rows import KEY_ROW_BITS, MAX_ROWS
from ...trace import TableTrace, Trace
from ..accesses import Accesses

__all__ = ["trace_of"]

_MAX_PADDING: Final = 64
_FREE_SAMPLES: Final = 1 << 20


def trace_of(accesses: Accesses) -> Trace:
    """A trace that ``accesses_of`` turns into the same accesses.

    A sample ends where the tables' order begins anew. That may join samples of the trace that the accesses were made
    of, where a table's lookups are missing, and samples of a single table. All batches of a trace have the same
    samples, so that empty ones are added to those that have fewer. What a recording counted of all rows is kept.

    Raises:
        ValueError: there is no table, a key is of none, or batches differ so much in size that most samples would be
            empty.
    """
    tables, starts = accesses.keys >> KEY_ROW_BITS, accesses.starts
    if len(tables) and int(tables.max()) >= len(accesses.tables):
        raise ValueError(f"a key is of table {int(tables.max())}, and there are {len(accesses.tables)} tables")
    begins = np.ones(len(tables), np.bool_)
    begins[1:] = tables[1:] < tables[:-1]
    own_starts = starts[:-1][np.diff(starts) > 0]
    begins[own_starts] = True
    samples_before = np.append(0, np.cumsum(begins))
    each = max(1, int(np.diff(samples_before[starts]).max(initial=0)))
    count = each * accesses.num_batches
    if count > _MAX_PADDING * (len(tables) + accesses.num_batches) + _FREE_SAMPLES:
        raise ValueError(
            f"one batch has {each:,} samples, most have far fewer: a trace would be made of empty ones. Write .npy"
        )
    batches = np.repeat(np.arange(accesses.num_batches), np.diff(starts))
    samples = samples_before[1:] - 1 - samples_before[starts[batches]] + each * batches
    found = {}
    for index, name in enumerate(accesses.tables):
        own = tables == index
        lengths = np.bincount(samples[own], minlength=count)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        found[name] = TableTrace(accesses.keys[own] & (MAX_ROWS - 1), offsets)
    return Trace(
        tables=found,
        batch_samples=each,
        sampling_rate=accesses.sampling_rate,
        all_lookups=accesses.all_lookups,
        all_batches=accesses.all_batches if accesses.unlisted else None,
    )
