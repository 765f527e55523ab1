"""Ids by Zipf's law, drawn afresh and fast, however many rows there are."""

from typing import Any, Final

import numpy as np

__all__ = ["Zipf"]

_HEAD_RANKS: Final = 1 << 16
_SCATTER: Final = 2_654_435_761
"""A prime above any number of rows here, so that multiplying by it modulo that number permutes the rows."""


class Zipf:
    """Rows 0 to ``rows - 1`` of a table, the r-th most frequent with a weight of r to the power of ``-exponent``.

    The first ranks are drawn by their summed weights, the rest by the integral of the law, which there differs from
    the sum by less than one in a thousand million. Frequent rows are scattered over the table.

    Args:
        exponent: above 0, and not 1.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        self._rows = rows
        self._power = 1 - exponent
        head = min(rows, _HEAD_RANKS)
        self._cumulated = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -exponent)
        self._first = (head + 0.5) ** self._power
        tail = ((rows + 0.5) ** self._power - self._first) / self._power
        self._total = float(self._cumulated[-1]) + tail

    def draw(self, generator: np.random.Generator, count: int) -> Any:
        """int64 [count]."""
        places = generator.random(count) * self._total
        ranks = np.searchsorted(self._cumulated, places, side="right")
        beyond = ranks == len(self._cumulated)
        areas = places[beyond] - self._cumulated[-1]
        tail = (self._first + self._power * areas) ** (1 / self._power)
        ranks[beyond] = np.minimum((tail + 0.5).astype(np.int64) - 1, self._rows - 1)
        return ranks.astype(np.int64) * _SCATTER % self._rows
