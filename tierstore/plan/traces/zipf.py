"""Ids by Zipf's law over any number of rows, without a table of weights; and traces of a workload made of them."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...kernels.arrays import Int64s
from ...kernels.hashing import mix64
from ...layout import MAX_ROWS
from ...trace import TableTrace, Trace
from ..analytic import zipf_bins
from ..workload import TableShape, Workload

_WORD: Final = (1 << 64) - 1
_ROUNDS: Final = 3
_MAX_DRAWS: Final = 1 << 40
_MAX_SAMPLES: Final = 1 << 36
_MAX_EXPONENT: Final = 100.0


def scattered(numbers: Int64s, rows: int, seed: int) -> Int64s:
    """A permutation of the numbers from 0 to ``rows - 1``, another for each seed: what it makes of some of them.

    Each round adds, multiplies and shifts numbers of as many bits as the rows need: each of these steps can be undone,
    so that no two numbers meet. A result that is no row is permuted again until it is one (cycle walking: Black,
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which takes two rounds on average at most.
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
        int64 [count], rows from 0 to ``rows - 1``.

    Raises:
        ValueError, TypeError: an argument that cannot be; names it and what is accepted.
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

    A sample has as many ids of a table as the pooling factor says; where that is no whole number, the next lower or
    higher one, by chance, so that their mean is it. Which rows of a table are the frequent ones depends on the table's
    place in the workload and not on ``seed``: other seeds give other samples of the same users. 40 bytes of memory an
    id of the largest table, 8 an id and 8 a sample and table.

    Raises:
        ValueError, TypeError: ``samples`` is no number from 1.
    """
    require_int(samples, "samples", 1, _MAX_SAMPLES)
    tables = {table.name: _table(table, index, samples, seed) for index, table in enumerate(workload.tables)}
    return Trace(tables=tables, batch_samples=workload.batch_samples)


def _table(table: TableShape, index: int, samples: int, seed: int) -> TableTrace:
    generator = np.random.default_rng((index, seed & _WORD))
    offsets = np.zeros(samples + 1, np.int64)
    np.cumsum(_lengths(generator, table.pooling_factor, samples), out=offsets[1:])
    drawn = int(generator.integers(1 << 63))
    ids = draw_zipf(table.num_embeddings, table.exponent, int(offsets[-1]), seed=drawn, scatter_seed=index)
    return TableTrace(ids, offsets)


def _lengths(generator: np.random.Generator, mean: float, samples: int) -> NDArray[np.int64]:
    whole = int(mean)
    lengths = np.full(samples, whole, np.int64)
    if mean > whole:
        lengths += generator.random(samples) < mean - whole
    return lengths
