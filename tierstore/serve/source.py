"""What monitoring asks of the server, and its form for Prometheus: values that are read when they are looked at."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..pool.stats import Stats

__all__ = ["PooledStats", "Source", "SourceCollector", "TableInfo"]


class PooledStats(NamedTuple):
    """The cache of pooled outputs: running totals, and the bytes it holds now."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0


class TableInfo(NamedTuple):
    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str


class Source(Protocol):
    """The server as it is now. Asked in any thread, at each scrape and each second that a status page is open: an
    answer waits for no batch and raises nothing, also while the store moves to another version or is closed."""

    @property
    def is_live(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def version(self) -> int:
        """That is served."""

    @property
    def newest_version(self) -> int:
        """That is known to exist, served or not."""

    @property
    def staleness_seconds(self) -> float:
        """For how long a newer version than the one that is served has been known; 0 when there is none."""

    def stats(self) -> Stats:
        """Running totals since the server started, over all versions it served."""

    def pooled(self) -> PooledStats | None:
        """None where pooled outputs are not cached."""

    def tables(self) -> Sequence[TableInfo]: ...

    def queued_samples(self) -> Mapping[str, int]:
        """Samples that wait for a batch, by model; every model is named."""


_TIER_COUNTERS: Final = {
    "lookups": "Ids asked of the tier, duplicates counted.",
    "hits": "Rows asked of the tier, once a batch, that it held; of ssd, that were stored.",
    "misses": "Rows asked of the tier, once a batch, that it did not hold; of ssd, that were never written.",
    "evictions": "Rows that left the tier for others.",
    "bytes_read": "Bytes of pages read from the tier; of ssd.",
}
_TIER_GAUGES: Final = {
    "bytes": "Memory that the tier holds: rows, index, policy and staging; of ssd, the map from rows to places.",
    "capacity_rows": "Rows that the tier has room for.",
}


class SourceCollector(Collector):
    """A source's values as metrics."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        yield from self._state()
        yield from self._tiers()
        yield from self._pooled()

    def _state(self) -> Iterable[Metric]:
        source = self._source
        gauges = {
            "live": ("Whether the server works, 1 or 0.", source.is_live),
            "ready": ("Whether the server takes requests, 1 or 0.", source.is_ready),
            "version": ("Version of the store that is served.", source.version),
            "newest_version": ("Newest version of the store that is known.", source.newest_version),
            "staleness_seconds": (
                "For how long a newer version than the one that is served has been known.",
                source.staleness_seconds,
            ),
        }
        for name, (documentation, value) in gauges.items():
            yield GaugeMetricFamily(f"tierstore_{name}", documentation, value=float(value))
        queued = GaugeMetricFamily("tierstore_queued_samples", "Samples that wait for a batch.", labels=["model"])
        for model, samples in source.queued_samples().items():
            queued.add_metric([model], samples)
        yield queued

    def _tiers(self) -> Iterable[Metric]:
        tiers = self._source.stats()._asdict()
        for field, documentation in _TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"tierstore_tier_{field}", documentation, labels=["tier"])
            for tier, stats in tiers.items():
                counter.add_metric([tier], getattr(stats, field))
            yield counter
        for field, documentation in _TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"tierstore_tier_{field}", documentation, labels=["tier"])
            for tier, stats in tiers.items():
                gauge.add_metric([tier], getattr(stats, field))
            yield gauge

    def _pooled(self) -> Iterable[Metric]:
        pooled = self._source.pooled()
        if pooled is None:
            return
        yield CounterMetricFamily("tierstore_pooled_hits", "Bags found in the cache of outputs.", value=pooled.hits)
        yield CounterMetricFamily(
            "tierstore_pooled_misses", "Bags not found in the cache of outputs.", value=pooled.misses
        )
        yield GaugeMetricFamily("tierstore_pooled_bytes", "Memory that the cache of outputs holds.", value=pooled.bytes)
