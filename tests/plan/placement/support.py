"""Costs and workloads to reckon with by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tierstore.plan import TableShape, Workload
from tierstore.plan.placement import RankCosts
from tierstore.plan.placement.costs import ASKER, KINDS, OWNER

_SECONDS = {
    "rows": {"groups": 3.0, "tables": 0.1, "ids": 0.01, "rows": 0.02, "served": 0.02, "served_columns": 0.002},
    "pooled": {"groups": 4.0, "ids": 0.01, "bag_columns": 0.001, "served": 0.03, "updated_columns": 0.001},
    "data_parallel": {"groups": 2.0, "rows": 0.05, "updated": 0.04, "updated_columns": 0.001},
}


def costs_of(ranks: int, *, other: Mapping[str, Mapping[str, float]] = {}, **changes: Any) -> RankCosts:
    """Of ranks of one host, each with a core. ``other``: seconds by kind and amount, of some."""
    seconds = {kind: dict.fromkeys((*ASKER, *OWNER), 0.0) | _SECONDS[kind] | other.get(kind, {}) for kind in KINDS}
    found = RankCosts(
        world_size=ranks, local_world_size=ranks, cores=ranks, optimizer="sgd", seconds=seconds,
        errors=dict.fromkeys(KINDS, 0.0),
    )  # fmt: skip
    return replace(found, **changes)


def workload_of(*tables: TableShape, samples: int = 64) -> Workload:
    return Workload(name="toy", tables=tables, batch_samples=samples, optimizer="sgd")
