"""How often rows are used: the shares of rows and of accesses by the number of uses."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["HISTOGRAM_LOWS", "ReuseBin", "reuse_histogram"]

HISTOGRAM_LOWS: Final = (0, *(1 << power for power in range(16)))
"""Bins of published histograms: (0, 1], (1, 2], (2, 4], ... and above 32,768."""


class ReuseBin(NamedTuple):
    """Rows that are used more than ``low`` and at most ``high`` times; None: without a limit.

    ``rows`` and ``accesses`` are shares of all.
    """

    low: int
    high: int | None
    rows: float
    accesses: float


def reuse_histogram(uses: NDArray[np.int64]) -> tuple[ReuseBin, ...]:
    """Of the uses of each row, int64 [rows], 1 or more; all shares are 0 where there is no row."""
    lows = np.array(HISTOGRAM_LOWS)
    bins = np.searchsorted(lows, uses, side="left") - 1
    rows = np.bincount(bins, minlength=len(lows)) / max(1, len(uses))
    accesses = np.bincount(bins, weights=uses, minlength=len(lows)) / max(1, int(uses.sum()))
    highs = (*HISTOGRAM_LOWS[1:], None)
    return tuple(
        ReuseBin(low, high, float(row_share), float(access_share))
        for low, high, row_share, access_share in zip(HISTOGRAM_LOWS, highs, rows, accesses, strict=True)
    )
