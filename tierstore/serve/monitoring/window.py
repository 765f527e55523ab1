"""The last minute, second by second: how long each request took, whence rates and quantiles."""

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["WINDOW_SECONDS", "History", "Recent", "Window", "by_second", "summarize"]

WINDOW_SECONDS: Final = 60
Latencies: TypeAlias = NDArray[np.float64]
"""Seconds of each request; NaN for one that failed, as how soon a server says no is not its latency."""


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
    """Every request of the last minute, at 8 bytes each; for any thread.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._first = int(clock())
        self._told: dict[int, dict[str, array[float]]] = {}

    def add(self, model: str, seconds: float, *, failed: bool) -> None:
        now = int(self._clock())
        with self._lock:
            if now not in self._told:
                self._told = {second: each for second, each in self._told.items() if second >= now - WINDOW_SECONDS}
                self._told[now] = {}
            told = self._told[now]
            if model not in told:
                told[model] = array("d")
            told[model].append(np.nan if failed else seconds)

    def seconds(self) -> list[Mapping[str, Latencies]]:
        """Latencies by model of each whole second that has passed, up to ``WINDOW_SECONDS``, oldest first."""
        now = int(self._clock())
        with self._lock:
            return [
                {model: np.array(each) for model, each in self._told.get(second, {}).items()}
                for second in range(max(self._first, now - WINDOW_SECONDS), now)
            ]


def summarize(seconds: Sequence[Latencies]) -> Recent:
    """Of the latencies of each second."""
    every = np.concatenate([np.empty(0), *seconds])
    number, failed = len(seconds) or 1, int(np.isnan(every).sum())
    return Recent(len(every) / number, failed / number, *_quantiles(every, 0.5, 0.95, 0.99))


def by_second(seconds: Sequence[Latencies]) -> History:
    """Of the latencies of each second."""
    quantiles = [_quantiles(each, 0.5, 0.99) for each in seconds]
    return History(
        [len(each) for each in seconds],
        [int(np.isnan(each).sum()) for each in seconds],
        [median for median, _ in quantiles],
        [late for _, late in quantiles],
    )


def _quantiles(latencies: Latencies, *fractions: float) -> list[Any]:
    """Those of the requests that did not fail; None where all did."""
    good = latencies[~np.isnan(latencies)]
    if not len(good):
        return [None] * len(fractions)
    return [float(each) for each in np.quantile(good, fractions, method="inverted_cdf")]
