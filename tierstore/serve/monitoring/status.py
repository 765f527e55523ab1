"""The server's state as one JSON document: what the status page shows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from ...system.sizes import machine_memory_bytes
from .metrics import OK, OTHER, WINDOW_SECONDS, Latencies, Metrics, Source, State, summarize

Seconds = Sequence[Mapping[str, Latencies]]
"""Of each second, the latencies by model."""


def snapshot(metrics: Metrics, source: Source, last_seconds: int = WINDOW_SECONDS) -> dict[str, Any]:
    """The state now, ready for JSON; for any thread. ``recent`` and ``history`` are of so many last whole seconds, a
    minute of them at most, oldest first; all other counts are since the start."""
    seconds, state, last = metrics.window.seconds()[-max(1, last_seconds) :], source(), metrics.last_update
    return {
        "server": {
            "worker": metrics.worker,
            "live": state.live,
            "ready": state.ready,
            "uptime_seconds": metrics.clock() - metrics.started,
            "window_seconds": WINDOW_SECONDS,
        },
        "version": {
            "served": state.version,
            "newest": state.newest_version,
            "staleness_seconds": state.staleness_seconds,
            **metrics.totals(),
            "last_update": last
            and {"version": last.version, "seconds": last.seconds, "age_seconds": metrics.clock() - last.at},
        },
        "watch": state.watch and state.watch._asdict(),
        "stores": [
            {"name": name, "ready": each.ready, "served": each.version, "newest": each.newest_version}
            | {"watch": each.watch and each.watch._asdict()}
            for name, each in state.stores.items()
        ],
        "requests": _requests(metrics, seconds),
        "models": _models(metrics, state, seconds),
        "tiers": [
            {"name": name, **tier._asdict(), "hit_rate": tier.hit_rate if tier.unique else None}
            for name, tier in state.tiers.tiers.items()
        ],
        "tables": [table._asdict() for table in state.tables],
        "memory": {"resident_bytes": psutil.Process().memory_info().rss, "machine_bytes": machine_memory_bytes()},
    }


def _requests(metrics: Metrics, seconds: Seconds) -> dict[str, Any]:
    by_status: dict[str, int] = {}
    for (_, _, status), count in metrics.requests().items():
        by_status[status] = by_status.get(status, 0) + count
    together = [np.concatenate([np.empty(0), *second.values()]) for second in seconds]
    history = [summarize([each]) for each in together]
    return {
        **_totals(by_status),
        "recent": summarize(together)._asdict(),
        "history": {
            "requests": [len(each) for each in together],
            "failed": [each.failed_per_second for each in history],
            "seconds_p50": [each.seconds_p50 for each in history],
            "seconds_p99": [each.seconds_p99 for each in history],
        },
        "refused": [
            {"protocol": protocol, "status": status, "count": count}
            for (protocol, status), count in sorted(metrics.refusals().items())
        ],
    }


def _models(metrics: Metrics, state: State, seconds: Seconds) -> list[dict[str, Any]]:
    """Each model, and last, once they were asked for, names that are no model's."""
    queued, out_of_range = state.queued_samples, metrics.ids_out_of_range()
    by_model: dict[str, dict[str, int]] = {name: {} for name in sorted(metrics.models, key=lambda name: name == OTHER)}
    for (model, _, status), count in metrics.requests().items():
        by_model[model][status] = by_model[model].get(status, 0) + count
    found = []
    for name, by_status in by_model.items():
        if name != OTHER or by_status or name in queued:
            own = [second.get(name, np.empty(0)) for second in seconds]
            found.append(
                {
                    "name": name,
                    **_totals(by_status),
                    "recent": summarize(own)._asdict(),
                    "history": {"requests": [len(each) for each in own]},
                    **metrics.batches(name),
                    "queued_samples": queued.get(name, 0),
                    "ids_out_of_range": out_of_range.get(name, 0),
                }
            )
    return found


def _totals(by_status: dict[str, int]) -> dict[str, Any]:
    total = sum(by_status.values())
    return {"total": total, "failed": total - by_status.get(OK, 0), "by_status": by_status}
