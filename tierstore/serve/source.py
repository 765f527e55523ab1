"""What the server is at the moment, for who monitors it, and its form for Prometheus."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..pool.stats import Stats


class TableInfo(NamedTuple):
    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str


class State(NamedTuple):
    """``newest_version`` is known to exist, served or not; ``staleness_seconds``: for how long a newer one than the
    served has been known; ``tiers``: running totals; ``queued_samples``: that wait for a batch, of every model."""

    live: bool
    ready: bool
    version: int
    newest_version: int
    staleness_seconds: float
    tiers: Stats
    tables: list[TableInfo]
    queued_samples: dict[str, int]


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
    """A source's values as metrics."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        state = self._source()
        for field, documentation in _STATE.items():
            yield GaugeMetricFamily(f"tierstore_{field}", documentation, value=float(getattr(state, field)))
        queued = GaugeMetricFamily("tierstore_queued_samples", "Samples that wait for a batch.", labels=["model"])
        for model, samples in state.queued_samples.items():
            queued.add_metric([model], samples)
        yield queued
        for kind, fields in ((CounterMetricFamily, _TIER_COUNTERS), (GaugeMetricFamily, _TIER_GAUGES)):
            for field, documentation in fields.items():
                family = kind(f"tierstore_tier_{field}", documentation, labels=["tier"])
                for tier, stats in state.tiers._asdict().items():
                    family.add_metric([tier], getattr(stats, field))
                yield family
