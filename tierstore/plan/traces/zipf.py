"""Ids by Zipf's law over any number of rows, without a table of weights; and traces of a workload made of them."""

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...kernels.hashing import mix64, unit
from ...kernels.jit import inline, kernel
from ...rows import MAX_ROWS
from ...trace import TableTrace, Trace
from ..workload import TableShape, Workload

_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_STEP: Final = np.uint64(_GOLDEN)
_ROUNDS: Final = 3
_TINY: Final = 1e-8
_MAX_DRAWS: Final = 1 << 40
_MAX_SAMPLES: Final = 1 << 36
_MAX_EXPONENT: Final = 100.0


class Scatter(NamedTuple):
    """A permutation of the numbers from 0 to ``rows - 1``, as kernels take it.

    Each round adds, multiplies and shifts numbers of as many bits as the rows need: each of these steps can be undone,
    so that no two numbers meet. A result that is no row is permuted again until it is one (cycle walking: Black,
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), which takes two rounds on average at most.

    Attributes:
        mask: one less than the power of two that is not below ``rows``.
        keys: uint64 [2 rounds], what is added, and the odd number that is multiplied by.
    """

    rows: np.uint64
    mask: np.uint64
    shift: np.uint64
    keys: NDArray[np.uint64]


def scatter_of(rows: int, seed: int) -> Scatter:
    """Some permutation for each seed.

    Raises:
        ValueError, TypeError: ``rows`` is none.
    """
    require_int(rows, "rows", 1, MAX_ROWS)
    bits = max(1, (rows - 1).bit_length())
    start = (seed & _WORD) ^ rows
    words = [int(mix64(np.uint64((start + number) & _WORD))) for number in range(2 * _ROUNDS)]
    keys = np.array([word | (number & 1) for number, word in enumerate(words)], np.uint64)
    return Scatter(np.uint64(rows), np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2), keys)


@inline
def scattered(number: Any, rows: Any, mask: Any, shift: Any, keys: Any) -> Any:
    """The row of ``number``; the rest are a ``Scatter``'s fields. A helper of kernels."""
    place = np.uint64(number)
    while True:
        for step in range(0, keys.shape[0], 2):
            place = np.uint64((place + keys[step]) * keys[step + 1]) & mask
            place = np.uint64(place ^ (place >> shift))
        if place < rows:
            return np.int64(place)


def draw_zipf(
    rows: int, exponent: float, count: int, *, seed: int, scatter_seed: int = 0, first: int = 0
) -> NDArray[np.int64]:
    """Rows of a table, independent of each other: the r-th most frequent with a chance as r to the power -exponent.

    Draw i is a function of ``seed`` and i alone, so that a long trace can be drawn in parts and the start of a longer
    one is the shorter one. Ranks are drawn by rejection-inversion (W. Hörmann, G. Derflinger, "Rejection-inversion to
    generate variates from monotone discrete distributions", ACM TOMACS 6, 1996) from 53 random bits.

    Args:
        rows: up to 2^40.
        exponent: from 0, all alike, to 100.
        scatter_seed: decides which rows are the frequent ones.
        first: number of the first draw.

    Returns:
        int64 [count], rows from 0 to ``rows - 1``.

    Raises:
        ValueError, TypeError: an argument that cannot be; names it and what is accepted.
    """
    require_int(rows, "rows", 1, MAX_ROWS)
    require_int(count, "count", 0, _MAX_DRAWS)
    require_int(first, "first", 0, _MAX_DRAWS)
    if not 0 <= exponent <= _MAX_EXPONENT:
        raise ValueError(f"exponent={exponent}: expected a number from 0 to {_MAX_EXPONENT:g}")
    out = np.empty(count, np.int64)
    # Draw i has the bits ``mix64(base + i * golden)``, as SplitMix64's (Steele, Lea, Flood: "Fast Splittable
    # Pseudorandom Number Generators", 2014).
    base = np.uint64((int(mix64(np.uint64(seed & _WORD))) + first * _GOLDEN) & _WORD)
    _draw(rows, float(exponent), base, *scatter_of(rows, scatter_seed), out)
    return out


@inline
def _expm1_by(x: Any) -> Any:
    """(e^x - 1) / x, also near 0."""
    return math.expm1(x) / x if abs(x) > _TINY else 1 + x / 2


@inline
def _log1p_by(x: Any) -> Any:
    """log(1 + x) / x, also near 0."""
    return math.log1p(x) / x if abs(x) > _TINY else 1 - x / 2


@inline
def _area(x: Any, exponent: Any) -> Any:
    """The integral of t^-exponent from 1 to x."""
    logarithm = math.log(x)
    return _expm1_by((1 - exponent) * logarithm) * logarithm


@inline
def _end_of(area: Any, exponent: Any) -> Any:
    """The inverse of ``_area``; infinity for more than there is."""
    scaled = area * (1 - exponent)
    return math.exp(_log1p_by(scaled) * area) if scaled > -1 else np.inf


@kernel
def _draw(
    num_rows: int, exponent: float, base: Any, rows: Any, mask: Any, shift: Any, keys: Any, out: NDArray[np.int64]
) -> None:
    """``rows``, ``mask``, ``shift`` and ``keys`` are a ``Scatter``."""
    if exponent == 0:
        for position in range(out.shape[0]):
            bits = mix64(np.uint64(base + np.uint64(position) * _STEP))
            out[position] = scattered(np.int64(unit(bits) * num_rows), rows, mask, shift, keys)
        return
    # Each rank k has the area from k - 1/2 to k + 1/2, which is at least its weight; where a point falls into what is
    # too much, it is drawn again. Near the middle that need not be looked at.
    low = _area(1.5, exponent) - 1
    high = _area(num_rows + 0.5, exponent)
    near = 2 - _end_of(_area(2.5, exponent) - 2.0**-exponent, exponent)
    for position in range(out.shape[0]):
        bits = mix64(np.uint64(base + np.uint64(position) * _STEP))
        while True:
            area = high + unit(bits) * (low - high)
            end = _end_of(area, exponent)
            rank = num_rows if end >= num_rows else max(1, int(end + 0.5))
            if rank - end <= near or area >= _area(rank + 0.5, exponent) - float(rank) ** -exponent:
                break
            bits = mix64(bits)
        out[position] = scattered(rank - 1, rows, mask, shift, keys)


def generate(workload: Workload, *, samples: int, seed: int) -> Trace:
    """Samples of the workload, in batches of its ``batch_samples``.

    A sample has as many ids of a table as the pooling factor says; where that is no whole number, the next lower or
    higher one, by chance, so that their mean is it. Which rows of a table are the frequent ones depends on the table's
    place in the workload and not on ``seed``: other seeds give other samples of the same users. 8 bytes of memory an
    id, and 8 a sample and table.

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
