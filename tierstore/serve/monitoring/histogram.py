"""Histograms for Prometheus that cost a bisection to observe: a third of the client library's own, which scan the
buckets in Python. Waits of a batch's queries are observed together."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

__all__ = ["Histogram", "Histograms", "Totals"]


class Totals(NamedTuple):
    num_values: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.num_values if self.num_values else None


class Histogram:
    """One series; for any thread.

    Args:
        bounds: upper bounds, inclusive, ascending; values beyond the last are counted too.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        buckets = [bisect_left(self._bounds, value) for value in values]
        with self._lock:
            for bucket in buckets:
                self._counts[bucket] += 1
            self._sum += sum(values)

    def read(self) -> tuple[list[int], float]:
        """How many values each bucket holds, the one beyond the last bound included, and their sum."""
        with self._lock:
            return list(self._counts), self._sum

    @property
    def totals(self) -> Totals:
        counts, total = self.read()
        return Totals(sum(counts), total)


class Histograms(Collector):
    """All series of a name, one for each combination of label values that was asked for."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(map(float, bounds))
        self._children: dict[tuple[str, ...], Histogram] = {}
        self._lock = threading.Lock()

    def child(self, *values: str) -> Histogram:
        """The series of these label values; made at the first call."""
        found = self._children.get(values)
        if found is None:
            assert len(values) == len(self._labels), (values, self._labels)
            with self._lock:
                found = self._children.setdefault(values, Histogram(self._bounds))
        return found

    def children(self) -> dict[tuple[str, ...], Histogram]:
        with self._lock:
            return dict(self._children)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        bounds = [*map(repr, self._bounds), "+Inf"]
        for values, histogram in self.children().items():
            counts, total = histogram.read()
            family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
        yield family
