"""Traces as a cache sees them: rows in the order in which they are asked for; what is in one, and drawing one."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Float64s, Int64s
from ..kernels.hashing import SECRET, mix64
from ..kernels.jit import kernel
from ..kernels.slots import unique_in_order
from ..layout import KEY_ROW_BITS, MAX_ROWS
from ..system.checks import excerpt, require_int
from ..system.terminal import columns_of
from ..trace import TableTrace, Trace, read_trace
from .workload import Workload

_TOP_SHARE: Final = 100
_MAX_SHOWN, _MAX_NAME = 40, 24
_WORD: Final = (1 << 64) - 1
_ROUNDS: Final = 3
_MAX_DRAWS, _MAX_SAMPLES, _MAX_EXPONENT = 1 << 40, 1 << 36, 100.0
_SINGLE_RANKS: Final = 256  # the hottest rows have a bin each
BIN_GROWTH: Final = 1.02
"""Of the ranks behind them, from bin to bin: a row's share is off by 1 % times the exponent at most."""


class Accesses(NamedTuple):
    """Rows in the order in which they are asked for."""

    keys: Int64s  # int64 [n], ``table index << 40 | row``
    starts: Int64s  # int64 [batches + 1], ascending from 0 to n: where each batch begins
    tables: tuple[str, ...]  # names, by table index
    sampling_rate: float = 1.0  # the share of all rows that are in it, each with every access (``sampling.is_sampled``)
    unlisted: int = 0  # further batches, in which none of the sampled rows was
    all_lookups: tuple[int, ...] | None = None  # to all rows, sampled or not, by table index; None: not known
    batch_samples: int = 0  # of a batch, or their mean; 0: not known

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
    starts = np.append(0, np.cumsum(lengths.sum(1)))[trace.batch_bounds]
    # A sampled recording joins a batch of which it has no row to the next one. If it did not count batches, it had as
    # many as its samples fill, about.
    unlisted = 0
    if trace.all_batches is not None:
        unlisted = trace.all_batches - (len(trace.batch_bounds) - 1)
    elif trace.num_entries != trace.num_samples:
        unlisted = max(0, round(trace.num_samples / trace.batch_samples) - trace.num_entries)
    rate, counted = trace.sampling_rate, trace.all_lookups
    return Accesses(keys, starts, tuple(trace.tables), rate, unlisted, counted, trace.batch_samples)


def read_accesses(path: str | os.PathLike[str]) -> Accesses:
    """Those of a file of ``tierstore trace`` or a recording. ValueError: it is no trace, or has no access.
    FileNotFoundError."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no such trace; a run or a server with --record writes one")
    found = accesses_of(read_trace(path))
    if not len(found.keys):
        raise ValueError(f"{path} has no access")
    return found


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


def describe(trace: Trace) -> str:
    """Lines for a terminal: what is in it, and how uneven; the tables with the most accesses. Some 40 bytes of memory
    an access while it counts."""
    accesses, counted, rate = accesses_of(trace), trace.all_lookups, trace.sampling_rate
    keys, uses = np.unique(accesses.keys, return_counts=True)
    ends = np.searchsorted(keys, np.arange(len(accesses.tables) + 1) << KEY_ROW_BITS)
    used_of = {name: uses[begin:end] for name, (begin, end) in zip(accesses.tables, pairwise(ends), strict=True)}
    counts = f"tables: {len(used_of):,}, batches: {accesses.all_batches:,}, samples: {trace.num_samples:,}"
    lines = [f"{len(accesses.keys):,} accesses of {len(keys):,} rows; {counts}"]
    if rate < 1:
        every = "" if counted is None else f", and {sum(counted):,} accesses"
        lines.append(f"a sample: {100 * rate:g} % of the rows; all have about {round(len(keys) / rate):,}{every}")
    largest = sorted(used_of.items(), key=lambda each: int(each[1].sum()), reverse=True)
    rows = [["table", "accesses", "rows", "ids/sample", "top 1 %", "used once"]]
    for name, used in [*largest[:_MAX_SHOWN], ("all", uses)]:
        total, most = int(used.sum()), int(np.sort(used)[::-1][: -(-len(used) // _TOP_SHARE)].sum())
        figures = f"{total:,}", f"{len(used):,}", f"{total / max(1, trace.num_samples):,.4g}"
        shares = most / max(1, total), np.count_nonzero(used == 1) / max(1, len(used))
        rows.append([excerpt(name, _MAX_NAME - 3).replace("'", ""), *figures, *(f"{100 * x:.1f} %" for x in shares)])
    shown = columns_of(rows, is_last_text=False)
    if len(largest) > _MAX_SHOWN:
        shown.insert(-1, f"... and {len(largest) - _MAX_SHOWN} tables with fewer accesses")
    explained = "top 1 %: share of the accesses by the 1 % of its used rows that are used most"
    return "\n".join([*lines, "", *shown, explained])


def scattered(numbers: Int64s, rows: int, seed: int) -> Int64s:
    """What a permutation of the numbers below ``rows``, another for each seed, makes of some of them.

    Each round adds, multiplies and shifts numbers of as many bits as the rows need, which can be undone. A result that
    is no row is permuted again until it is one (cycle walking: Black, Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002), twice on average at most.
    """
    bits = max(1, (rows - 1).bit_length())
    mask, shift, start = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2), (seed & _WORD) ^ rows
    words = [mix64(np.uint64((start + number) & _WORD)) for number in range(2 * _ROUNDS)]
    places, outside = numbers.astype(np.uint64), np.arange(len(numbers))
    while len(outside):
        moved = places[outside]
        for added, factor in zip(words[::2], words[1::2], strict=True):
            moved = (moved + added) * (factor | np.uint64(1)) & mask
            moved ^= moved >> shift
        places[outside] = moved
        outside = outside[moved >= rows]
    return places.astype(np.int64)


def zipf_bins(num_rows: int, exponent: float) -> tuple[Float64s, Float64s]:
    """(rows of each bin, share of all ids of one row in it): row k is looked up in proportion to ``k ** -exponent``.

    A bin's weight is the integral over it, from half a rank before to half a rank behind.
    """
    single = min(num_rows, _SINGLE_RANKS)
    growing = single * BIN_GROWTH ** np.arange(1, 2 + np.log(num_rows / single) / np.log(BIN_GROWTH))
    ends = np.unique(np.minimum(np.append(np.arange(1, single + 1), np.ceil(growing)), num_rows))
    starts = np.append(0.0, ends[:-1])
    rows = ends - starts
    low, power = starts + 0.5, 1 - exponent
    logs = np.log((ends + 0.5) / low)
    scaled = power * logs  # near 0 where the exponent is near 1
    growth = np.where(np.abs(scaled) < 1e-12, 1.0, np.expm1(scaled) / np.where(scaled == 0, 1.0, scaled))
    weights = np.where(rows == 1, ends**-exponent, low**power * logs * growth / rows)
    return rows, weights / (rows @ weights)


def draw_zipf(rows: int, exponent: float, count: int, *, seed: int, scatter_seed: int = 0) -> Int64s:
    """Rows of a table of up to 2^40, independent of each other, int64 [count]: the r-th most frequent with a chance as
    r to the power -exponent (0, all alike, to 100), of rows that ``zipf_bins`` takes together the mean of theirs.
    ``scatter_seed`` decides which rows are the frequent ones. ValueError, TypeError: an argument is out of range."""
    require_int(rows, "rows", 1, MAX_ROWS)
    require_int(count, "count", 0, _MAX_DRAWS)
    if not 0 <= exponent <= _MAX_EXPONENT:
        raise ValueError(f"exponent={exponent}: expected a number from 0 to {_MAX_EXPONENT:g}")
    generator = np.random.default_rng(seed & _WORD)
    sizes, shares = zipf_bins(rows, exponent)
    ends, chances = np.cumsum(sizes).astype(np.int64), np.cumsum(sizes * shares)
    bins = np.minimum(np.searchsorted(chances, generator.random(count), side="right"), len(ends) - 1)
    ranks = ends[bins] - 1 - generator.integers(0, sizes.astype(np.int64)[bins])
    return scattered(ranks, rows, scatter_seed)


def generate(workload: Workload, *, samples: int, seed: int) -> Trace:
    """Samples of the workload, in batches of its ``batch_samples``. A pooling factor of 2.5 means 2 or 3 ids by chance.
    Which rows of a table are frequent depends on its place in the workload and not on ``seed``: other seeds give other
    samples of the same users. Memory: 40 bytes an id of the largest table, 8 an id and 8 a sample and table.
    ValueError, TypeError: ``samples`` is below 1."""
    require_int(samples, "samples", 1, _MAX_SAMPLES)
    tables = {}
    for index, table in enumerate(workload.tables):
        generator, whole = np.random.default_rng((index, seed & _WORD)), int(table.pooling_factor)
        lengths = np.full(samples, whole, np.int64)
        if table.pooling_factor > whole:
            lengths += generator.random(samples) < table.pooling_factor - whole
        offsets = np.append(0, np.cumsum(lengths))
        drawn, rows = int(generator.integers(1 << 63)), table.num_embeddings
        ids = draw_zipf(rows, table.exponent, int(offsets[-1]), seed=drawn, scatter_seed=index)
        tables[table.name] = TableTrace(ids, offsets)
    return Trace(tables=tables, batch_samples=workload.batch_samples)
