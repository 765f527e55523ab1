"""The server's state as one JSON document: what the status page shows."""

from typing import Any

import psutil
from numpy.typing import NDArray

from ...pool.stats import TierStats
from ...system.sizes import machine_memory_bytes
from ..source import Source
from .metrics import OK, OTHER, Metrics
from .window import QUANTILE_ERROR, WINDOW_SECONDS, by_second, summarize

__all__ = ["snapshot"]


def snapshot(metrics: Metrics, source: Source) -> dict[str, Any]:
    """The state now, ready for JSON; may be called in any thread.

    Times are in seconds. ``recent`` and ``history`` are of the last whole seconds, up to a minute of them,
    oldest first; all other counts are since the start.
    """
    counts = metrics.window.counts()
    return {
        "server": {
            "worker": metrics.worker,
            "live": source.is_live,
            "ready": source.is_ready,
            "uptime_seconds": metrics.clock() - metrics.started,
            "window_seconds": WINDOW_SECONDS,
            "quantile_error": QUANTILE_ERROR,
        },
        "version": _version(metrics, source),
        "requests": _requests(metrics, counts.sum(axis=1)),
        "models": _models(metrics, source, counts),
        "tiers": [_tier(name, tier) for name, tier in source.stats()._asdict().items()],
        "pooled": pooled._asdict() if (pooled := source.pooled()) else None,
        "tables": [table._asdict() for table in source.tables()],
        "memory": {"resident_bytes": psutil.Process().memory_info().rss, "machine_bytes": machine_memory_bytes()},
    }


def _version(metrics: Metrics, source: Source) -> dict[str, Any]:
    last = metrics.last_update
    return {
        "served": source.version,
        "newest": source.newest_version,
        "staleness_seconds": source.staleness_seconds,
        "updates": metrics.num_updates,
        "update_failures": metrics.num_update_failures,
        "last_update": last
        and {"version": last.version, "seconds": last.seconds, "age_seconds": metrics.clock() - last.at},
    }


def _requests(metrics: Metrics, counts: NDArray[Any]) -> dict[str, Any]:
    """Of all models together; ``counts``: [seconds, columns]."""
    by_status: dict[str, int] = {}
    for (_, _, status), count in metrics.requests().items():
        by_status[status] = by_status.get(status, 0) + count
    return {
        **_totals(by_status),
        "recent": summarize(counts)._asdict(),
        "history": by_second(counts)._asdict(),
        "refused": [
            {"protocol": protocol, "status": status, "count": count}
            for (protocol, status), count in sorted(metrics.refusals().items())
        ],
    }


def _models(metrics: Metrics, source: Source, counts: NDArray[Any]) -> list[dict[str, Any]]:
    """Each model, and names that are no model's once they were asked for; ``counts``: [seconds, models, columns]."""
    queued = source.queued_samples()
    out_of_range = metrics.ids_out_of_range()
    by_model: dict[str, dict[str, int]] = {name: {} for name in metrics.models}
    for (model, _, status), count in metrics.requests().items():
        by_model[model][status] = by_model[model].get(status, 0) + count
    return [
        {
            "name": name,
            **_totals(by_status),
            "recent": summarize(counts[:, index])._asdict(),
            "history": {"requests": counts[:, index].sum(axis=1).tolist()},
            **_batches(metrics, name),
            "queued_samples": queued.get(name, 0),
            "ids_out_of_range": out_of_range.get(name, 0),
        }
        for index, (name, by_status) in sorted(enumerate(by_model.items()), key=lambda each: each[1][0] == OTHER)
        if index < counts.shape[1] and (name != OTHER or by_status or name in queued)
    ]


def _totals(by_status: dict[str, int]) -> dict[str, Any]:
    total = sum(by_status.values())
    return {"total": total, "failed": total - by_status.get(OK, 0), "by_status": by_status}


def _batches(metrics: Metrics, model: str) -> dict[str, Any]:
    totals = metrics.batches(model)
    return {
        "batches": totals.samples.num_values,
        "batch_queries_mean": totals.queries.mean,
        "batch_samples_mean": totals.samples.mean,
        "queue_seconds_mean": totals.queue_seconds.mean,
        "compute_seconds_mean": totals.compute_seconds.mean,
    }


def _tier(name: str, tier: TierStats) -> dict[str, Any]:
    return {
        "name": name,
        "lookups": tier.lookups,
        "unique": tier.unique,
        "hits": tier.hits,
        "misses": tier.misses,
        "hit_rate": tier.hit_rate if tier.unique else None,
        "evictions": tier.evictions,
        "bytes": tier.bytes,
        "capacity_rows": tier.capacity_rows,
    }
