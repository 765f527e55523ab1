"""Traces: what is in one, and drawing one by Zipf's law."""

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s
from ..kernels.hashing import mix64
from ..layout import KEY_ROW_BITS, MAX_ROWS
from ..system.checks import excerpt, require_int
from ..system.terminal import columns_of
from ..trace import TableTrace, Trace
from .accesses import accesses_of, read_accesses
from .analytic import zipf_bins
from .json_file import plain
from .workload import TableShape, Workload

__all__ = ["TableSummary", "TraceSummary", "describe", "draw_zipf", "generate", "read_accesses"]

_TOP_SHARE: Final = 100
_MAX_SHOWN, _MAX_NAME = 40, 24
_WORD: Final = (1 << 64) - 1
_ROUNDS: Final = 3
_MAX_DRAWS: Final = 1 << 40
_MAX_SAMPLES: Final = 1 << 36
_MAX_EXPONENT: Final = 100.0


class TableSummary(NamedTuple):
    """Of one table, or of all.

    Attributes:
        accesses: to the rows that are in the trace.
        all_accesses: to all rows; None where the trace is a sample that does not say.
        rows: distinct ones that are used.
        top_share: of the accesses, by the hundredth of the used rows that is used most.
    """

    name: str
    accesses: int
    all_accesses: int | None
    rows: int
    ids_a_sample: float
    top_share: float
    used_once: int


class TraceSummary(NamedTuple):
    """Of a trace; ``sampling_rate``: of the rows that are in it, which the counts are of."""

    total: TableSummary
    tables: tuple[TableSummary, ...]
    batches: int
    samples: int
    sampling_rate: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dict(plain(self))

    def text(self) -> str:
        """Lines for a terminal; the tables with the most accesses."""
        total, rate = self.total, self.sampling_rate
        counts = f"tables: {len(self.tables):,}, batches: {self.batches:,}, samples: {self.samples:,}"
        lines = [f"{total.accesses:,} accesses of {total.rows:,} rows; {counts}"]
        if rate < 1:
            every = "" if total.all_accesses is None else f", and {total.all_accesses:,} accesses"
            lines.append(f"a sample: {100 * rate:g} % of the rows; all have about {round(total.rows / rate):,}{every}")
        rows = [["table", "accesses", "rows", "ids/sample", "top 1 %", "used once", "all accesses"]]
        largest = sorted(self.tables, key=lambda table: table.accesses, reverse=True)
        for each in [*largest[:_MAX_SHOWN], total]:
            name, used_once = excerpt(each.name, _MAX_NAME - 3).replace("'", ""), each.used_once / max(1, each.rows)
            shares = (f"{100 * each.top_share:.1f} %", f"{100 * used_once:.1f} %")
            of_all = "" if each.all_accesses is None else f"{each.all_accesses:,}"
            rows.append([name, f"{each.accesses:,}", f"{each.rows:,}", f"{each.ids_a_sample:,.4g}", *shares, of_all])
        if rate == 1 or total.all_accesses is None:
            rows = [row[:-1] for row in rows]
        shown = columns_of(rows, is_last_text=False)
        if len(largest) > _MAX_SHOWN:
            shown.insert(-1, f"... and {len(largest) - _MAX_SHOWN} tables with fewer accesses")
        explained = "top 1 %: share of the accesses by the 1 % of its used rows that are used most"
        return "\n".join([*lines, "", *shown, explained])


def describe(trace: Trace) -> TraceSummary:
    """Count. Some 40 bytes of memory an access while it counts."""
    accesses, counted = accesses_of(trace), trace.all_lookups
    keys, uses = np.unique(accesses.keys, return_counts=True)
    ends = np.searchsorted(keys, (np.arange(len(accesses.tables) + 1) << KEY_ROW_BITS)).tolist()

    def summary(name: str, used: Int64s, of_all: int | None) -> TableSummary:
        """``of_all``: accesses to all rows, where they are known apart."""
        total = int(used.sum())
        return TableSummary(
            name=name,
            accesses=total,
            all_accesses=total if of_all is None and trace.sampling_rate == 1 else of_all,
            rows=len(used),
            ids_a_sample=total / max(1, trace.num_samples),
            top_share=int(np.sort(used)[::-1][: -(-len(used) // _TOP_SHARE)].sum()) / max(1, total),
            used_once=int(np.count_nonzero(used == 1)),
        )

    tables = tuple(
        summary(name, uses[begin:end], None if counted is None else counted[index])
        for index, (name, (begin, end)) in enumerate(zip(accesses.tables, pairwise(ends), strict=True))
    )
    total = summary("all", uses, None if counted is None else sum(counted))
    return TraceSummary(total, tables, accesses.all_batches, trace.num_samples, trace.sampling_rate)


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


def draw_zipf(rows: int, exponent: float, count: int, *, seed: int, scatter_seed: int = 0) -> Int64s:
    """Rows of a table, independent of each other: the r-th most frequent with a chance as r to the power -exponent, of
    the rows that ``analytic.zipf_bins`` takes together the mean of theirs.

    Args:
        rows: up to 2^40.
        exponent: from 0, all alike, to 100.
        scatter_seed: decides which rows are the frequent ones.

    Returns:
        int64 [count], rows from 0 to ``rows - 1``. ValueError, TypeError: an argument is out of range.
    """
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
    """Samples of the workload, in batches of its ``batch_samples``.

    A pooling factor of 2.5 means 2 or 3 ids by chance. Which rows of a table are the frequent ones depends on the
    table's place in the workload and not on ``seed``: other seeds give other samples of the same users. 40 bytes of
    memory an id of the largest table, 8 an id and 8 a sample and table. ValueError, TypeError: ``samples`` is below 1.
    """
    require_int(samples, "samples", 1, _MAX_SAMPLES)
    tables = {table.name: _table(table, index, samples, seed) for index, table in enumerate(workload.tables)}
    return Trace(tables=tables, batch_samples=workload.batch_samples)


def _table(table: TableShape, index: int, samples: int, seed: int) -> TableTrace:
    generator, whole = np.random.default_rng((index, seed & _WORD)), int(table.pooling_factor)
    lengths = np.full(samples, whole, np.int64)
    if table.pooling_factor > whole:
        lengths += generator.random(samples) < table.pooling_factor - whole
    offsets = np.append(0, np.cumsum(lengths))
    drawn = int(generator.integers(1 << 63))
    ids = draw_zipf(table.num_embeddings, table.exponent, int(offsets[-1]), seed=drawn, scatter_seed=index)
    return TableTrace(ids, offsets)
