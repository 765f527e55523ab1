"""What the server did: counted as it happens, read by Prometheus and, of the last minute, by a canary."""

import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily as Counts
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.core import SummaryMetricFamily as Summary
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..metrics import TITLES
from ..pool.stats import Stats
from .messages import Status
from .watch import WatchReading

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OK: Final = "ok"
OTHER: Final = "other"
"""Stands for all names that clients made up, so that they cannot make up series."""

_REQUEST_SECONDS: Final = tuple(each * 1e-3 for each in (0.25, 0.5, *(1 << power for power in range(13)), 10_000))
"""A power of two apart: each is a series of each model, protocol and status."""
_UPDATE_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class _Seconds:
    """Durations, counted by bucket."""

    def __init__(self, bounds: Sequence[float] = _REQUEST_SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def values(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus has them: how many were at most so long, and the sum."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self.sum


class _Batches:
    """Of one model."""

    def __init__(self) -> None:
        self.queries, self.samples = 0, 0
        self.queued, self.computed = _Seconds(), _Seconds()


class Metrics(Collector):
    """All that one worker process counts; for any thread. ``models`` get series of their own; all others share
    ``OTHER``."""

    def __init__(self, models: Sequence[str], *, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._models = set[str]()
        self.window = Window(clock)
        self._lock = threading.Lock()
        self._requests: defaultdict[tuple[str, str, str], _Seconds] = defaultdict(_Seconds)
        self._batches: defaultdict[str, _Batches] = defaultdict(_Batches)
        self._refused: Counter[tuple[str, str]] = Counter()
        self._out_of_range: Counter[str] = Counter()
        self._updates, self._update_failures = _Seconds(_UPDATE_SECONDS), 0
        self._registry = CollectorRegistry()
        self.know(models)
        self.add(self)
        ProcessCollector(registry=self._registry)

    def know(self, models: Iterable[str]) -> None:
        """Give these models series of their own: counters now, so that each has a rate from its first count on;
        histograms once the model is asked, as most of many models never are."""
        self._models = self._models.union(models)

    # What happened

    def answered(self, model: str, protocol: str, status: Status | None, seconds: float) -> None:
        """A request was answered ``seconds`` after it arrived; ``status`` None: well."""
        model = self._known(model)
        with self._lock:
            self._requests[model, protocol, OK if status is None else status.name.lower()].add(seconds)
        self.window.add(seconds if status is None else np.nan)

    def batched(
        self, model: str, num_queries: int, num_samples: int, queue_seconds: Sequence[float], compute_seconds: float
    ) -> None:
        with self._lock:
            found = self._batches[self._known(model)]
            found.queries += num_queries
            found.samples += num_samples
            found.computed.add(compute_seconds)
            for seconds in queue_seconds:
                found.queued.add(seconds)

    def refused(self, protocol: str, status: Status) -> None:
        """A request was refused before a model was asked; it counts as failed, too."""
        with self._lock:
            self._refused[protocol, status.name.lower()] += 1
        self.window.add(np.nan)

    def updated(self, seconds: float) -> None:
        with self._lock:
            self._updates.add(seconds)

    def update_failed(self) -> None:
        with self._lock:
            self._update_failures += 1

    def out_of_range(self, model: str, count: int) -> None:
        with self._lock:
            self._out_of_range[self._known(model)] += count

    def add(self, collector: Collector) -> None:
        """Expose what another collector knows; it is asked at each scrape."""
        self._registry.register(collector)

    # What it came to

    def expose(self) -> bytes:
        """All series in Prometheus's text format; their type is ``CONTENT_TYPE``."""
        return generate_latest(_Labelled(self._registry, worker=str(self._worker)))

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            of, by_status = ["model"], ["protocol", "status"]
            known, batches = self._models, self._batches
            every = {(name,): batches.get(name, _NO_BATCH) for name in known | batches.keys()}
            ids = {(name,): self._out_of_range[name] for name in known | self._out_of_range.keys()}
            requests = {key: each.values for key, each in self._requests.items()}
            queued = {(name,): each.queued.values for name, each in batches.items()}
            computed = {(name,): each.computed.values for name, each in batches.items()}
            queries = {key: (each.computed.count, each.queries) for key, each in every.items()}
            samples = {key: (each.computed.count, each.samples) for key, each in every.items()}
            failures = {(): self._update_failures}
            return [
                _family(Histogram, "request_seconds", "From arrival to answer.", [*of, *by_status], requests),
                _family(Histogram, "queue_seconds", "Time that a query waits for its batch.", of, queued),
                _family(Histogram, "compute_seconds", "Of a batch: lookups and the model.", of, computed),
                _family(Histogram, "update_seconds", "Moves to another version.", [], {(): self._updates.values}),
                _family(Summary, "batch_queries", "Queries in a batch.", of, queries),
                _family(Summary, "batch_samples", "Samples in a batch.", of, samples),
                _family(Counts, "refused_requests", "Refused before a model was asked.", by_status, self._refused),
                _family(Counts, "ids_out_of_range", "Ids that no row of their table has.", of, ids),
                _family(Counts, "update_failures", "Updates that failed; the old version stayed.", [], failures),
            ]

    def _known(self, model: str) -> str:
        return model if model in self._models else OTHER


_NO_BATCH: Final = _Batches()


def _family(kind: Any, name: str, text: str, labels: Sequence[str], values: Mapping[Any, Any]) -> Metric:
    """``values``: by the labels' values, a number or what ``add_metric`` takes."""
    family = kind(f"tierstore_{name}", text, labels=labels)
    for key, each in values.items():
        family.add_metric(key, *(each if isinstance(each, tuple) else (float(each),)))
    found: Metric = family
    return found


class _Labelled(CollectorRegistry):
    """A registry's samples, each with more labels."""

    def __init__(self, registry: Collector, **labels: str) -> None:
        super().__init__()
        self._inner = registry
        self._added = labels

    def collect(self) -> Iterable[Metric]:
        for metric in self._inner.collect():
            metric.samples = [each._replace(labels={**each.labels, **self._added}) for each in metric.samples]
            yield metric


WINDOW_SECONDS: Final = 60


class Window:
    """Latencies of every request of the last minute, at 8 bytes each; NaN for one that failed, as how soon a server
    says no is not its latency. For any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[int, array[float]] = {}

    def add(self, seconds: float) -> None:
        now = int(self._clock())
        with self._lock:
            if now not in self._told:
                self._told = {second: each for second, each in self._told.items() if second >= now - WINDOW_SECONDS}
                self._told[now] = array("d")
            self._told[now].append(seconds)

    def latencies(self, seconds: int) -> NDArray[np.float64]:
        """Of so many last whole seconds, at most ``WINDOW_SECONDS``; any number of requests."""
        now = int(self._clock())
        with self._lock:
            last = range(now - min(seconds, WINDOW_SECONDS), now)
            return np.concatenate([np.empty(0), *(self._told[each] for each in last if each in self._told)])


class State(NamedTuple):
    """``newest_version`` is known to exist, served or not; ``staleness_seconds``: for how long a newer one than the
    served has been known; ``tiers``: running totals; ``queued_samples``: that wait for a batch, of every model;
    ``stores``: by name, if there are several; ``watch``: the newest loss on watched rows, if that was measured; event
    times: None if the version has none."""

    live: bool
    ready: bool
    version: int
    newest_version: int
    staleness_seconds: float
    tiers: Stats
    queued_samples: dict[str, int]
    stores: Mapping[str, "State"] = {}
    watch: WatchReading | None = None
    event_time_seconds: float | None = None
    event_to_served_seconds: float | None = None


Source = Callable[[], State]
"""The server as it is now. Called in any thread, at each scrape: it waits for no batch and raises nothing, also while
the store moves to another version or is closed."""

_STATE: Final = {
    "live": "Whether the server works, 1 or 0.",
    "ready": "Whether the server takes requests, 1 or 0.",
    "version": "Version of the store that is served.",
    "newest_version": "Newest version of the store that is known.",
    "staleness_seconds": "For how long a newer version than the one served has been known.",
    "event_time_seconds": "Greatest event time of the rows that the version was trained on, Unix time.",
    "event_to_served_seconds": "From that event to when this server first showed a version with it.",
}
_TIER_COUNTERS: Final = {
    "lookups": "Ids asked of the tier, duplicates counted.",
    "hits": "Rows asked of the tier, once a batch, that it held; of ssd, that were stored.",
    "misses": "Rows asked of the tier, once a batch, that it did not hold; of ssd, that were never written.",
    "evictions": "Rows that left the tier for others.",
    "bytes_read": "Bytes of pages read from the tier; of ssd.",
}
_TIER_GAUGES: Final = {
    "bytes": "Memory that the tier holds: rows, index, policy and staging; of ssd, the map from rows to places.",
    "capacity_rows": "Rows that the tier can hold.",
}


class StateCollector(Collector):
    """A source's values as metrics; of several stores each store's, with a label."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        state = self._source()
        of = ["store"] if state.stores else []
        states: dict[tuple[str, ...], State] = {(name,): each for name, each in state.stores.items()}
        states = states or {(): state}
        watched = {store: each.watch for store, each in states.items() if each.watch is not None}
        tiers = {(*store, tier): stats for store, each in states.items() for tier, stats in each.tiers.tiers.items()}
        queued = {(model,): count for model, count in state.queued_samples.items()}
        for name, text in _STATE.items():
            yield _family(Gauge, name, text, of, _fields(states, name))
        for name in ("version", "rows", *TITLES):
            yield _family(Gauge, f"watch_{name}", "Of the last reading of --watch.", of, _fields(watched, name))
        yield _family(Gauge, "queued_samples", "Samples that wait for a batch.", ["model"], queued)
        for kind, fields in ((Counts, _TIER_COUNTERS), (Gauge, _TIER_GAUGES)):
            for name, text in fields.items():
                yield _family(kind, f"tier_{name}", text, [*of, "tier"], _fields(tiers, name))


def _fields(records: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    return {key: value for key, each in records.items() if (value := getattr(each, name)) is not None}
