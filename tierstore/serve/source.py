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


_STATE: Final = {
    "live": ("is_live", "Whether the server works, 1 or 0."),
    "ready": ("is_ready", "Whether the server takes requests, 1 or 0."),
    "version": ("version", "Version of the store that is served."),
    "newest_version": ("newest_version", "Newest version of the store that is known."),
    "staleness_seconds": ("staleness_seconds", "For how long a newer version than the one served has been known."),
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
    "capacity_rows": "Rows that the tier has room for.",
}
_POOLED: Final[dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]]] = {
    "hits": (CounterMetricFamily, "Bags found in the cache of outputs."),
    "misses": (CounterMetricFamily, "Bags not found in the cache of outputs."),
    "bytes": (GaugeMetricFamily, "Memory that the cache of outputs holds."),
}


class SourceCollector(Collector):
    """A source's values as metrics."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        source = self._source
        for name, (field, documentation) in _STATE.items():
            yield GaugeMetricFamily(f"tierstore_{name}", documentation, value=float(getattr(source, field)))
        queued = GaugeMetricFamily("tierstore_queued_samples", "Samples that wait for a batch.", labels=["model"])
        for model, samples in source.queued_samples().items():
            queued.add_metric([model], samples)
        yield queued
        tiers = source.stats()._asdict()
        for kind, fields in ((CounterMetricFamily, _TIER_COUNTERS), (GaugeMetricFamily, _TIER_GAUGES)):
            for field, documentation in fields.items():
                family = kind(f"tierstore_tier_{field}", documentation, labels=["tier"])
                for tier, stats in tiers.items():
                    family.add_metric([tier], getattr(stats, field))
                yield family
        pooled = source.pooled()
        for field, (family_class, documentation) in _POOLED.items() if pooled is not None else ():
            yield family_class(f"tierstore_pooled_{field}", documentation, value=getattr(pooled, field))
