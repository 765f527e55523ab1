"""What the server did: counted as it happens, read by Prometheus and by the status page."""

import operator
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...pool.stats import Stats
from ..messages import ModelStatistics, Status
from ..watch import WatchReading

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OK: Final = "ok"
OTHER: Final = "other"
"""Stands for all names that clients made up, so that they cannot make up series."""

_REQUEST_SECONDS: Final = tuple(each * 1e-3 for each in (0.25, 0.5, *(1 << power for power in range(13)), 10_000))
"""A power of two apart: each is a series of each model, protocol and status."""
_UPDATE_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class LastUpdate(NamedTuple):
    """The newest update applied: how long it took, and when, on the metrics' clock."""

    version: int
    seconds: float
    at: float


class _Answered(NamedTuple):
    requests: int = 0
    seconds: float = 0.0


class _Series(NamedTuple):
    """Of one model's batches; to find them by its name takes longer than to add to them."""

    queries: Summary
    samples: Summary
    computed: Histogram
    queued: Histogram


_NO_BATCH: Final = [0.0] * 6
"""Batches, queries, samples, seconds that queries waited, that batches took, and that the queries' batches took."""


class Metrics:
    """All that one worker process counts; for any thread. ``models`` get series of their own; all others share
    ``OTHER``."""

    def __init__(self, models: Sequence[str], *, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker = worker
        self.clock = clock
        self.started = clock()
        self.models = {OTHER: None}
        self.window = Window(clock)
        self.last_update: LastUpdate | None = None
        # Alongside the series, as to read those lists every bucket of each.
        self._answered: dict[tuple[str, str, str], _Answered] = {}
        self._last: dict[str, float] = {}
        self._batched: dict[str, list[float]] = {}
        self._series: dict[str, _Series] = {}
        self._answers: dict[tuple[str, str, str], Histogram] = {}
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        model, by_status = ["model"], ["protocol", "status"]

        def histogram(name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> Histogram:
            return Histogram(f"tierstore_{name}", text, labels, buckets=bounds, registry=self._registry)

        def summary(name: str, text: str, labels: Sequence[str]) -> Summary:
            return Summary(f"tierstore_{name}", text, labels, registry=self._registry)

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            return Counter(f"tierstore_{name}", text, labels, registry=self._registry)

        self._requests = histogram("request_seconds", "From arrival to answer.", [*model, *by_status], _REQUEST_SECONDS)
        self._queued = histogram("queue_seconds", "That a query waited for its batch.", model, _REQUEST_SECONDS)
        self._computed = histogram("compute_seconds", "Of a batch: lookups and the model.", model, _REQUEST_SECONDS)
        self._queries = summary("batch_queries", "Queries in a batch.", model)
        self._samples = summary("batch_samples", "Samples in a batch.", model)
        self._updates = histogram("update_seconds", "Moves to another version, reading included.", [], _UPDATE_SECONDS)
        self._refused = counter("refused_requests", "Requests refused before a model was asked.", by_status)
        self._out_of_range = counter("ids_out_of_range", "Ids that no row of their table has.", model)
        self._update_failures = counter("update_failures", "Updates that failed; the old version stayed.", [])
        self.know(models)
        ProcessCollector(registry=self._registry)

    def know(self, models: Iterable[str]) -> None:
        """Give these models series of their own: counters now, so that each has a rate from its first count on;
        histograms once the model is asked, as most of many models never are."""
        for name in models:
            for each in (self._queries, self._samples, self._out_of_range):
                each.labels(name)
        self.models = self.models | dict.fromkeys(models)

    # What happened

    def answered(self, model: str, protocol: str, status: Status | None, seconds: float) -> None:
        """A request was answered ``seconds`` after it arrived; ``status`` None: well."""
        key = model, _, _ = self._known(model), protocol, OK if status is None else status.name.lower()
        if key not in self._answers:
            self._answers[key] = self._requests.labels(*key)
        self._answers[key].observe(seconds)
        with self._lock:
            before = self._answered.get(key, _Answered())
            self._answered[key] = _Answered(before.requests + 1, before.seconds + seconds)
            self._last[model] = time.time()
        self.window.add(model, seconds, failed=status is not None)

    def batched(
        self, model: str, num_queries: int, num_samples: int, queue_seconds: Sequence[float], compute_seconds: float
    ) -> None:
        model = self._known(model)
        series = self._series.get(model) or self._series_of(model)
        series.queries.observe(num_queries)
        series.samples.observe(num_samples)
        series.computed.observe(compute_seconds)
        for seconds in queue_seconds:
            series.queued.observe(seconds)
        added = (1, num_queries, num_samples, sum(queue_seconds), compute_seconds, compute_seconds * num_queries)
        with self._lock:
            self._batched[model] = list(map(operator.add, self._batched.get(model, _NO_BATCH), added))

    def _series_of(self, model: str) -> _Series:
        self._series[model] = found = _Series(
            self._queries.labels(model), self._samples.labels(model), self._computed.labels(model),
            self._queued.labels(model),
        )  # fmt: skip
        return found

    def refused(self, protocol: str, status: Status) -> None:
        """A request was refused before a model was asked; it counts as failed, too."""
        self._refused.labels(protocol, status.name.lower()).inc()
        self.window.add(OTHER, 0.0, failed=True)

    def updated(self, version: int, seconds: float) -> None:
        self._updates.observe(seconds)
        self.last_update = LastUpdate(version, seconds, self.clock())

    def update_failed(self) -> None:
        self._update_failures.inc()

    def out_of_range(self, model: str, count: int) -> None:
        self._out_of_range.labels(self._known(model)).inc(count)

    def add(self, collector: Collector) -> None:
        """Expose what another collector knows; it is asked at each scrape."""
        self._registry.register(collector)

    # What it came to

    def expose(self) -> bytes:
        """All series in Prometheus's text format; their type is ``CONTENT_TYPE``."""
        return generate_latest(_Labelled(self._registry, worker=str(self.worker)))

    def requests(self) -> dict[tuple[str, str, str], int]:
        """Answered since the start, by (model, protocol, status)."""
        with self._lock:
            return {key: answered.requests for key, answered in self._answered.items()}

    def statistics(self, model: str) -> ModelStatistics:
        """Of a model, over both protocols."""
        with self._lock:
            batches, queries, _, queue_seconds, _, compute_seconds = self._batched.get(model, _NO_BATCH)
            told = [(status == OK, answered) for (name, _, status), answered in self._answered.items() if name == model]
            last = self._last.get(model, 0.0)
        good, bad = ([answered for is_good, answered in told if is_good is wanted] for wanted in (True, False))
        return ModelStatistics(
            last_ms=int(last * 1e3),
            success_count=sum(each.requests for each in good),
            success_seconds=sum(each.seconds for each in good),
            fail_count=sum(each.requests for each in bad),
            fail_seconds=sum(each.seconds for each in bad),
            batches=int(batches),
            queries=int(queries),
            queue_seconds=queue_seconds,
            compute_seconds=compute_seconds,
        )

    def batches(self, model: str) -> dict[str, float | None]:
        """How many batches a model had since the start, and what they were on average; None of none."""
        with self._lock:
            batches, queries, samples, queue_seconds, compute_seconds, _ = self._batched.get(model, _NO_BATCH)
        return {
            "batches": batches,
            "batch_queries_mean": queries / batches if batches else None,
            "batch_samples_mean": samples / batches if batches else None,
            "queue_seconds_mean": queue_seconds / queries if queries else None,
            "compute_seconds_mean": compute_seconds / batches if batches else None,
        }

    def totals(self) -> dict[str, int]:
        """Updates, and those that failed, since the start."""
        return {
            "updates": int(_values(self._updates.collect(), "_count")[()]),
            "update_failures": int(_values(self._update_failures.collect(), "_total")[()]),
        }

    def refusals(self) -> dict[tuple[str, ...], int]:
        """Since the start, by (protocol, status)."""
        return {labels: int(value) for labels, value in _values(self._refused.collect(), "_total").items()}

    def ids_out_of_range(self) -> dict[str, int]:
        """Since the start, by model."""
        return {labels[0]: int(value) for labels, value in _values(self._out_of_range.collect(), "_total").items()}

    def _known(self, model: str) -> str:
        return model if model in self.models else OTHER


class _Labelled(CollectorRegistry):
    """A registry's samples, each with more labels; without the series "created", gauges that nothing here reads."""

    def __init__(self, registry: Collector, **labels: str) -> None:
        super().__init__()
        self._inner = registry
        self._added = labels

    def collect(self) -> Iterable[Metric]:
        for metric in self._inner.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._added})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def _values(families: Iterable[Metric], suffix: str) -> dict[tuple[str, ...], float]:
    """Values by those of their labels, in the labels' order."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith(suffix)
    }


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

    def latest(self, seconds: int) -> list[Latencies]:
        """Latencies of all models in each of the last seconds."""
        return [np.concatenate([np.empty(0), *each.values()]) for each in self.seconds()[-seconds:]]


def summarize(seconds: Sequence[Latencies]) -> Recent:
    """Of the latencies of each second."""
    every = np.concatenate([np.empty(0), *seconds])
    number, good = len(seconds) or 1, every[~np.isnan(every)]
    quantiles = np.quantile(good, (0.5, 0.95, 0.99), method="inverted_cdf").tolist() if len(good) else [None] * 3
    return Recent(len(every) / number, (len(every) - len(good)) / number, *quantiles)


class TableInfo(NamedTuple):
    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str


class State(NamedTuple):
    """``newest_version`` is known to exist, served or not; ``staleness_seconds``: for how long a newer one than the
    served has been known; ``tiers``: running totals; ``queued_samples``: that wait for a batch, of every model;
    ``stores``: by name, if there are several; ``watch``: the newest loss on watched rows, if that was measured."""

    live: bool
    ready: bool
    version: int
    newest_version: int
    staleness_seconds: float
    tiers: Stats
    tables: list[TableInfo]
    queued_samples: dict[str, int]
    stores: Mapping[str, "State"] = {}
    watch: WatchReading | None = None


Source = Callable[[], State]
"""The server as it is now. Called in any thread, at each scrape and each second that a status page is open: it waits
for no batch and raises nothing, also while the store moves to another version or is closed."""

_STATE: Final = {
    "live": "Whether the server works, 1 or 0.",
    "ready": "Whether the server takes requests, 1 or 0.",
    "version": "Version of the store that is served.",
    "newest_version": "Newest version of the store that is known.",
    "staleness_seconds": "For how long a newer version than the one served has been known.",
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
        names, states = (["store"], state.stores) if state.stores else ([], {"": state})
        for field, documentation in _STATE.items():
            gauge = GaugeMetricFamily(f"tierstore_{field}", documentation, labels=names)
            for store, each in states.items():
                gauge.add_metric([store] * len(names), float(getattr(each, field)))
            yield gauge
        for field in ("version", "log_loss", "rows"):
            gauge = GaugeMetricFamily(f"tierstore_watch_{field}", "Of the last reading of --watch.", labels=names)
            for store, each in states.items():
                if each.watch is not None:
                    gauge.add_metric([store] * len(names), getattr(each.watch, field))
            yield gauge
        queued = GaugeMetricFamily("tierstore_queued_samples", "Samples that wait for a batch.", labels=["model"])
        for model, samples in state.queued_samples.items():
            queued.add_metric([model], samples)
        yield queued
        for kind, fields in ((CounterMetricFamily, _TIER_COUNTERS), (GaugeMetricFamily, _TIER_GAUGES)):
            for field, documentation in fields.items():
                family = kind(f"tierstore_tier_{field}", documentation, labels=[*names, "tier"])
                for store, each in states.items():
                    for tier, stats in each.tiers.tiers.items():
                        family.add_metric([*[store] * len(names), tier], getattr(stats, field))
                yield family
