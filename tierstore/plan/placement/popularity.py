"""Zipf's law by bins of ranks: how many distinct rows a batch names, and ids drawn by it."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_ids", "expected_distinct"]

_HEAD_RANKS: Final = 4096
_BINS_A_DOUBLING: Final = 32
_SCATTER: Final = 2_654_435_761
"""A prime above any number of rows here, so that multiplying by it modulo that number permutes the rows."""
_DRAWN_ROWS_MAX: Final = 1 << 31


def expected_distinct(num_rows: int, lookups: float, exponent: float) -> float:
    """Of so many rows, how many ``lookups`` independent ids name on average: the sum of 1 - (1 - p)^lookups.

    The r-th most popular row has a weight of r to the power of ``-exponent``. The first 4096 ranks are summed one by
    one, the others in bins that grow by a 32nd of a doubling, each row of a bin having its mean weight; so a table of
    2^40 rows takes 900 bins. The error is below a thousandth.
    """
    if lookups <= 0:
        return 0.0
    starts = _bin_starts(num_rows)
    counts = np.diff(starts).astype(np.float64)
    chances = _weights(starts, exponent) / counts
    chances /= float(chances @ counts)
    # log1p(-1) is minus infinity, which is right: a row that every id names is there.
    with np.errstate(divide="ignore"):
        missing = np.exp(lookups * np.log1p(-np.minimum(chances, 1.0)))
    return float(counts @ (1 - missing))


def draw_ids(generator: np.random.Generator, num_rows: int, count: int, exponent: float) -> NDArray[np.int64]:
    """int64 [count]: independent ids by Zipf's law, with the same mean weight for the rows of a bin; popular rows lie
    scattered over the table.

    Raises:
        ValueError: more than 2^31 rows.
    """
    if num_rows > _DRAWN_ROWS_MAX:
        raise ValueError(f"{num_rows:,} rows; ids are drawn of up to 2^31")
    starts = _bin_starts(num_rows)
    cumulated = np.cumsum(_weights(starts, exponent))
    bins = np.searchsorted(cumulated, generator.random(count) * cumulated[-1], side="right")
    bins = np.minimum(bins, len(cumulated) - 1)
    widths = starts[bins + 1] - starts[bins]
    ranks = starts[bins] - 1 + (generator.random(count) * widths).astype(np.int64)
    found: NDArray[np.int64] = ranks * _SCATTER % num_rows
    return found


def _bin_starts(num_rows: int) -> NDArray[np.int64]:
    """int64 [bins + 1]: the first rank of each bin, and one beyond the last; ranks count from 1."""
    head = np.arange(1, min(num_rows, _HEAD_RANKS) + 1, dtype=np.int64)
    if num_rows <= _HEAD_RANKS:
        return np.append(head, num_rows + 1)
    doublings = np.log2((num_rows + 1) / (_HEAD_RANKS + 1))
    exponents = np.linspace(0, doublings, int(np.ceil(doublings * _BINS_A_DOUBLING)) + 1)
    tail = np.round((_HEAD_RANKS + 1) * 2**exponents).astype(np.int64)
    tail[-1] = num_rows + 1
    return np.concatenate([head, np.unique(tail)])


def _weights(starts: NDArray[np.int64], exponent: float) -> NDArray[np.float64]:
    """float64 [bins]: the summed weight of each; of bins of several ranks by the integral over them (midpoint rule)."""
    begins, ends = starts[:-1] - 0.5, starts[1:] - 0.5
    if exponent == 1:
        summed = np.log(ends / begins)
    else:
        summed = (ends ** (1 - exponent) - begins ** (1 - exponent)) / (1 - exponent)
    alone = np.diff(starts) == 1
    summed[alone] = starts[:-1][alone].astype(np.float64) ** -exponent
    return summed
