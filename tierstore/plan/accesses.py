"""Accesses: which rows are asked for, one after another, as a cache sees them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s
from ..kernels.hashing import SECRET
from ..kernels.jit import kernel
from ..kernels.slots import unique_in_order
from ..layout import KEY_ROW_BITS
from ..trace import Trace, read_trace


class Accesses(NamedTuple):
    """Rows in the order in which they are asked for.

    Attributes:
        keys: int64 [n], ``table index << 40 | row``.
        starts: int64 [batches + 1], ascending from 0 to n: where each batch begins.
        tables: names, by table index.
        sampling_rate: the share of all rows that are in it, each with every access (``sampling.is_sampled``).
        unlisted: further batches, in which none of the sampled rows was.
        all_lookups: accesses to all rows, sampled or not, by table index; None where they are not known.
    """

    keys: Int64s
    starts: Int64s
    tables: tuple[str, ...]
    sampling_rate: float = 1.0
    unlisted: int = 0
    all_lookups: tuple[int, ...] | None = None

    @property
    def num_batches(self) -> int:
        """Those that ``starts`` lists."""
        return len(self.starts) - 1

    @property
    def all_batches(self) -> int:
        """By which means over the batches are divided."""
        return self.num_batches + self.unlisted


class Numbered(NamedTuple):
    """int32 [n]: rows numbered from 0 in order of first use; and how many are distinct."""

    numbers: NDArray[np.int32]
    num_rows: int


def numbered(keys: Int64s) -> Numbered:
    """Number the distinct keys. 8 to 16 bytes a key of memory, besides the result's 4."""
    scratch = np.full(1 << max(2, (2 * len(keys) - 1).bit_length()), -1, np.int32)
    numbers = np.empty(len(keys), np.int32)
    return Numbered(numbers, unique_in_order(keys, scratch, np.empty(len(keys), np.int64), numbers, SECRET))


def accesses_of(trace: Trace) -> Accesses:
    """Entry by entry, and table by table within an entry, in batches as the trace was made in."""
    lengths = np.stack([np.diff(table.offsets) for table in trace.tables.values()], axis=1)
    begins = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    keys = np.empty(trace.num_lookups, np.int64)
    for index, table in enumerate(trace.tables.values()):
        places = np.repeat(begins[:, index] - table.offsets[:-1], lengths[:, index]) + np.arange(len(table.ids))
        keys[places] = table.ids | (index << KEY_ROW_BITS)
    ends = np.append(0, np.cumsum(lengths.sum(1)))
    starts, names = ends[trace.batch_bounds], tuple(trace.tables)
    return Accesses(keys, starts, names, trace.sampling_rate, _unlisted(trace), trace.all_lookups)


def read_accesses(path: str | os.PathLike[str]) -> Accesses:
    """Those of a file of ``tierstore trace`` or a recording. ValueError: it is no trace, or has no access.
    FileNotFoundError."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no such trace; a run or a server with --record writes one")
    found = accesses_of(read_trace(path))
    if not len(found.keys):
        raise ValueError(f"{path} has no access")
    return found


def _unlisted(trace: Trace) -> int:
    """A sampled recording joins a batch of which it has no row to the next one. If it did not count batches, it had
    about as many as its samples fill."""
    if trace.all_batches is not None:
        return trace.all_batches - (len(trace.batch_bounds) - 1)
    if trace.num_entries == trace.num_samples:
        return 0
    return max(0, round(trace.num_samples / trace.batch_samples) - trace.num_entries)


def once_a_batch(accesses: Accesses) -> Accesses:
    """Each row of a batch once, as the tiers of a store count (``TierStats.unique``), in order of first use. How many
    these would be of all rows, no recording of a sample knows."""
    is_first = first_uses(numbered(accesses.keys), accesses.starts)
    starts = np.append(0, np.cumsum(is_first))[accesses.starts]
    return accesses._replace(keys=accesses.keys[is_first], starts=starts, all_lookups=None)


def first_uses(accesses: Numbered, starts: Int64s) -> NDArray[np.bool_]:
    """bool [n]: whether no access before it in its batch is to the same row; ``starts`` as of ``Accesses``."""
    is_first = np.empty(len(accesses.numbers), np.bool_)
    _first_in_batch(accesses.numbers, starts, np.full(accesses.num_rows, -1, np.int64), is_first)
    return is_first


@kernel
def _first_in_batch(numbers: NDArray[np.int32], starts: Int64s, newest: Int64s, is_first: NDArray[np.bool_]) -> None:
    """``newest``: the last batch that each row was in, -1 before."""
    for batch in range(starts.size - 1):
        for position in range(starts[batch], starts[batch + 1]):
            is_first[position] = newest[numbers[position]] != batch
            newest[numbers[position]] = batch


def of_tables(accesses: Accesses, indexes: Sequence[int]) -> Accesses:
    """Those of some tables, as one sequence."""
    is_chosen = np.isin(np.arange(len(accesses.tables)), indexes)
    chosen = is_chosen[accesses.keys >> KEY_ROW_BITS]
    starts = np.append(0, np.cumsum(chosen))[accesses.starts]
    counted = accesses.all_lookups
    lookups = None if counted is None else tuple(np.where(is_chosen, counted, 0).tolist())
    return accesses._replace(keys=accesses.keys[chosen], starts=starts, all_lookups=lookups)
