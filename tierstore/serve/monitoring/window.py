"""The last minute, second by second: how many requests took how long, whence rates and quantiles."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTILE_ERROR", "WINDOW_SECONDS", "History", "Recent", "Window", "by_second", "summarize"]

WINDOW_SECONDS: Final = 60

_LOW_SECONDS: Final = 1e-5
_HIGH_SECONDS: Final = 100.0
_RATIO: Final = 1.04
QUANTILE_ERROR: Final = math.sqrt(_RATIO) - 1
"""Relative: a quantile is its bucket's geometric middle, and this far at most from a latency in [10 us, 100 s]."""

_LOG_LOW: Final = math.log(_LOW_SECONDS)
_PER_LOG: Final = 1 / math.log(_RATIO)
_NUM_BUCKETS: Final = math.ceil((math.log(_HIGH_SECONDS) - _LOG_LOW) * _PER_LOG)
_FAILED: Final = _NUM_BUCKETS
_WIDTH: Final = _NUM_BUCKETS + 1
"""The last column counts the requests that failed: how soon a server says no is not its latency."""
_SLOTS: Final = WINDOW_SECONDS + 1


class Recent(NamedTuple):
    """What up to ``WINDOW_SECONDS`` last whole seconds held; quantiles are None where no request was ok."""

    requests_per_second: float
    failed_per_second: float
    seconds_p50: float | None
    seconds_p95: float | None
    seconds_p99: float | None


class History(NamedTuple):
    """The last whole seconds one by one, oldest first; quantiles are None where no request was ok."""

    requests: list[int]
    failed: list[int]
    seconds_p50: list[float | None]
    seconds_p99: list[float | None]


class Window:
    """Counts of some series (models, say) over the last minute, in ``num_series`` x 99 KiB; for any thread.

    Args:
        num_series: they are numbered from 0.
        clock: seconds that only grow.
    """

    def __init__(self, num_series: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = np.zeros((_SLOTS, num_series, _WIDTH), np.int32)
        self._cells = self._counts.reshape(-1).data  # an item of it costs half of an array's
        self._stride = num_series * _WIDTH
        self._first = self._second = int(clock())

    def add(self, series: int, seconds: float, *, failed: bool) -> None:
        column = _FAILED if failed else _bucket_of(seconds)
        with self._lock:
            self._cells[self._advance() * self._stride + series * _WIDTH + column] += 1

    def widen(self, num_series: int) -> None:
        """Add series behind those there are."""
        with self._lock:
            added = np.zeros((_SLOTS, num_series, _WIDTH), np.int32)
            self._counts = np.concatenate([self._counts, added], axis=1)
            self._cells = self._counts.reshape(-1).data
            self._stride = self._counts.shape[1] * _WIDTH

    def counts(self) -> NDArray[np.int32]:
        """[seconds, series, columns] of the whole seconds that have passed, oldest first; a copy."""
        with self._lock:
            self._advance()
            num_seconds = min(self._second - self._first, WINDOW_SECONDS)
            order = np.arange(self._second - num_seconds, self._second) % _SLOTS
            return self._counts[order]

    def _advance(self) -> int:
        """The slot of the current second; those of seconds that nobody added to are emptied."""
        second = int(self._clock())
        for passed in range(min(second - self._second, _SLOTS)):
            self._counts[(second - passed) % _SLOTS] = 0
        self._second = second
        return second % _SLOTS


def summarize(counts: NDArray[Any]) -> Recent:
    """Of [seconds, columns]."""
    totals = counts.sum(axis=0)
    num_seconds = len(counts) or 1
    ok = totals[:_FAILED]
    return Recent(
        int(totals.sum()) / num_seconds,
        int(totals[_FAILED]) / num_seconds,
        _quantile(ok, 0.5),
        _quantile(ok, 0.95),
        _quantile(ok, 0.99),
    )


def by_second(counts: NDArray[Any]) -> History:
    """Of [seconds, columns]."""
    return History(
        counts.sum(axis=1).tolist(),
        counts[:, _FAILED].tolist(),
        [_quantile(second[:_FAILED], 0.5) for second in counts],
        [_quantile(second[:_FAILED], 0.99) for second in counts],
    )


def _quantile(counts: NDArray[Any], fraction: float) -> float | None:
    """The latency in seconds that ``fraction`` of the requests counted stay within; ``counts``: [buckets]."""
    cumulative = np.cumsum(counts)
    if not cumulative[-1]:
        return None
    rank = max(math.ceil(fraction * int(cumulative[-1])), 1)
    bucket = int(np.searchsorted(cumulative, rank))
    return math.exp(_LOG_LOW + (bucket + 0.5) / _PER_LOG)


def _bucket_of(seconds: float) -> int:
    if seconds <= _LOW_SECONDS:
        return 0
    return min(int((math.log(seconds) - _LOG_LOW) * _PER_LOG), _NUM_BUCKETS - 1)
