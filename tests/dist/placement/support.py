"""Costs, tables and demands to reckon with by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore import TableConfig, optim
from tierstore.dist.placement import Demand, RankCosts, demand_of
from tierstore.dist.placement.costs import KINDS, Errors, Kinds, Seconds
from tierstore.trace import TableTrace, Trace

_SECONDS: Mapping[str, Mapping[str, float]] = {
    "rows": {"groups": 3.0, "tables": 0.1, "ids": 0.01, "rows": 0.02, "served": 0.02, "served_columns": 0.002},
    "pooled": {"groups": 4.0, "ids": 0.01, "bag_columns": 0.001, "served": 0.03, "updated_columns": 0.001},
    "data_parallel": {"groups": 2.0, "rows": 0.05, "updated": 0.04, "updated_columns": 0.001},
}


def costs_of(ranks: int, *, other: Mapping[str, Mapping[str, float]] = {}, **changes: Any) -> RankCosts:
    """Of ranks of one host, each with a core. ``other``: seconds by kind and amount, of some."""
    seconds = Kinds(**{kind: Seconds(**_SECONDS[kind] | dict(other.get(kind, {}))) for kind in KINDS})
    found = RankCosts(
        world_size=ranks, local_world_size=ranks, cores=ranks, optimizer="sgd", seconds=seconds, errors=Errors()
    )
    return replace(found, **changes)


def table(name: str, num_rows: int, dim: int = 8) -> TableConfig:
    return TableConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, optimizer=optim.SGD())


def trace_of(tables: list[TableConfig], *, samples: int = 64, batches: int = 3, seed: int = 0) -> Trace:
    generator, size = np.random.default_rng(seed), 2 * samples * batches
    offsets = np.arange(0, size + 1, 2)
    ids = {each.name: (each.num_embeddings * generator.random(size) ** 3).astype(np.int64) for each in tables}
    return Trace(tables={name: TableTrace(own, offsets) for name, own in ids.items()}, batch_samples=samples)


def drawn(tables: list[TableConfig], ranks: int, *, samples: int = 64) -> Demand:
    return demand_of(trace_of(tables, samples=samples), tables, ranks)
