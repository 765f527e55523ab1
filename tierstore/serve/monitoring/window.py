"""The last minute, second by second: how long each request took, whence rates and quantiles."""

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


class Window:
    """Every request of the last minute, at 8 bytes each; for any thread."""

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
    number, good = len(seconds) or 1, every[~np.isnan(every)]
    quantiles = np.quantile(good, (0.5, 0.95, 0.99), method="inverted_cdf").tolist() if len(good) else [None] * 3
    return Recent(len(every) / number, (len(every) - len(good)) / number, *quantiles)
