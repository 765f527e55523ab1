"""What the server did: counted as it happens, read by Prometheus and by the status page."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from ..messages import Status
from .histogram import Histograms, Totals
from .window import Window

__all__ = ["CONTENT_TYPE", "OK", "OTHER", "BatchTotals", "LastUpdate", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OK: Final = "ok"
OTHER: Final = "other"
"""Stands for all names that clients made up, so that they cannot make up series."""
_PROTOCOLS: Final = ("grpc", "http")

_STATUS_NAMES: Final = {status: status.name.lower() for status in Status}

_MS: Final = 1e-3
_REQUEST_SECONDS: Final = tuple(
    milliseconds * _MS
    for milliseconds in (
        *(0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60),
        *(80, 100, 150, 250, 500, 1000, 2500, 5000, 10_000),
    )
)
_BATCH_SIZES: Final = tuple(float(1 << power) for power in range(17))
_UPDATE_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class LastUpdate(NamedTuple):
    """The newest update applied.

    Attributes:
        seconds: that it took.
        at: on the metrics' clock.
    """

    version: int
    seconds: float
    at: float


class BatchTotals(NamedTuple):
    """Of one model's batches; ``samples.num_values`` is the number of batches."""

    queries: Totals
    samples: Totals
    queue_seconds: Totals
    compute_seconds: Totals


class Metrics:
    """All that one worker process counts; for any thread, at about a microsecond a request.

    Args:
        models: names that get series of their own; all others share one, ``OTHER``.
        worker: index of the process among those that serve; a label of every series.
        clock: seconds that only grow.
    """

    def __init__(self, models: Sequence[str], *, worker: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker = worker
        self.clock = clock
        self.started = clock()
        self.models: tuple[str, ...] = (OTHER,)
        self.window = Window(1, clock=clock)
        self.last_update: LastUpdate | None = None
        self._series = {OTHER: 0}
        self._registry = CollectorRegistry()
        self._make_histograms()
        self._make_counters()
        self.know(models)
        ProcessCollector(registry=self._registry)

    def _make_histograms(self) -> None:
        self._requests = self._histograms(
            "request_seconds",
            "From a request's arrival to its answer.",
            ["model", "protocol", "status"],
            _REQUEST_SECONDS,
        )
        self._queue_seconds = self._histograms(
            "queue_seconds", "That a query waited for its batch.", ["model"], _REQUEST_SECONDS
        )
        self._compute_seconds = self._histograms(
            "compute_seconds", "That a batch took: lookups and the model.", ["model"], _REQUEST_SECONDS
        )
        self._batch_queries = self._histograms("batch_queries", "Queries in a batch.", ["model"], _BATCH_SIZES)
        self._batch_samples = self._histograms("batch_samples", "Samples in a batch.", ["model"], _BATCH_SIZES)
        self._update_seconds = self._histograms(
            "update_seconds", "That moving to another version took, reading what changed included.", [], _UPDATE_SECONDS
        )
        self._update_seconds.child()

    def _make_counters(self) -> None:
        self._refused = self._counter(
            "refused_requests", "Requests refused before a model was asked.", ["protocol", "status"]
        )
        self._out_of_range = self._counter("ids_out_of_range", "Ids that no row of their table has.", ["model"])
        self._update_failures = self._counter("update_failures", "Updates that failed; the old version stayed.", [])

    def know(self, models: Iterable[str]) -> None:
        """Give these models series of their own, if they have none; in order of ``models`` they are numbered."""
        new = [name for name in dict.fromkeys(models) if name not in self._series]
        self.window.widen(len(new))
        for name in new:
            self._series[name] = len(self._series)
            # A series that starts at 0 has a rate from its first request on.
            self.batches(name)
            for protocol in _PROTOCOLS:
                self._requests.child(name, protocol, OK)
            self._out_of_range.labels(name)
        self.models = tuple(self._series)

    def _histograms(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> Histograms:
        made = Histograms(f"tierstore_{name}", documentation, labels, bounds)
        self._registry.register(made)
        return made

    def _counter(self, name: str, documentation: str, labels: Sequence[str]) -> Counter:
        return Counter(f"tierstore_{name}", documentation, labels, registry=self._registry)

    # What happened

    def answered(self, model: str, protocol: str, status: Status | None, seconds: float) -> None:
        """A request was answered; ``status`` None: well. ``seconds`` since it arrived."""
        model = self._known(model)
        self._requests.child(model, _known_protocol(protocol), _status_name(status)).observe(seconds)
        self.window.add(self._series[model], seconds, failed=status is not None)

    def batched(
        self, model: str, num_queries: int, num_samples: int, queue_seconds: Sequence[float], compute_seconds: float
    ) -> None:
        """A batch was computed; ``queue_seconds`` of each of its queries."""
        model = self._known(model)
        self._batch_queries.child(model).observe(num_queries)
        self._batch_samples.child(model).observe(num_samples)
        self._queue_seconds.child(model).observe_all(queue_seconds)
        self._compute_seconds.child(model).observe(compute_seconds)

    def refused(self, protocol: str, status: Status | None) -> None:
        """A request was refused before a model was asked; ``status`` None: the error has none."""
        self._refused.labels(_known_protocol(protocol), OTHER if status is None else _status_name(status)).inc()

    def updated(self, version: int, seconds: float) -> None:
        """Another version is served since now."""
        self._update_seconds.child().observe(seconds)
        self.last_update = LastUpdate(version, seconds, self.clock())

    def update_failed(self) -> None:
        self._update_failures.inc()

    def out_of_range(self, model: str, count: int) -> None:
        self._out_of_range.labels(self._known(model)).inc(count)

    def add(self, collector: Collector) -> None:
        """Expose what another collector knows, a ``SourceCollector`` say; it is asked at each scrape."""
        self._registry.register(collector)

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Expose a gauge, tierstore_NAME, read at each scrape."""
        Gauge(f"tierstore_{name}", documentation, registry=self._registry).set_function(read)

    # What it came to

    def expose(self) -> bytes:
        """All series in Prometheus's text format; their type is ``CONTENT_TYPE``."""
        return generate_latest(_Labelled(self._registry, worker=str(self.worker)))

    def requests(self) -> dict[tuple[str, str, str], int]:
        """Answered since the start, by (model, protocol, status)."""
        return {
            (model, protocol, status): histogram.totals.num_values
            for (model, protocol, status), histogram in self._requests.children().items()
        }

    def batches(self, model: str) -> BatchTotals:
        kinds = (self._batch_queries, self._batch_samples, self._queue_seconds, self._compute_seconds)
        return BatchTotals(*(kind.child(model).totals for kind in kinds))

    @property
    def num_updates(self) -> int:
        return self._update_seconds.child().totals.num_values

    @property
    def num_update_failures(self) -> int:
        return int(sum(_values(self._update_failures).values()))

    def refusals(self) -> dict[tuple[str, ...], int]:
        """Since the start, by (protocol, status)."""
        return {labels: int(value) for labels, value in _values(self._refused).items()}

    def ids_out_of_range(self) -> dict[str, int]:
        """Since the start, by model."""
        return {labels[0]: int(value) for labels, value in _values(self._out_of_range).items()}

    def _known(self, model: str) -> str:
        return model if model in self._series else OTHER


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


def _known_protocol(protocol: str) -> str:
    return protocol if protocol in _PROTOCOLS else OTHER


def _status_name(status: Status | None) -> str:
    return OK if status is None else _STATUS_NAMES[status]


def _values(counter: Counter) -> dict[tuple[str, ...], float]:
    """A counter's values by its labels' values, in the labels' order."""
    (metric,) = counter.collect()
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples if sample.name.endswith("_total")}
