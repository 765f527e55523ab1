"""Table-wise plans by the greedy rules that learned placement is compared with.

Each rule gives a table a weight; tables are dealt out, heaviest first, each to the rank with the least weight that has
the space. AutoShard (KDD 2022), DreamShard (NeurIPS 2022) and NeuroShard (MLSys 2023) compare with them.
"""

from collections.abc import Sequence
from typing import Final, get_args

import numpy as np

from tierstore import TableConfig
from tierstore.dist import Plan, Sharding
from tierstore.dist.placement import Demand, Prediction, RankCosts, TableDemand, predict
from tierstore.dist.placement.search import size_bytes_of
from tierstore.dist.plan import Exchange

__all__ = ["RULES", "greedy"]

RULES: Final = ("size", "dim", "lookups", "size-lookups", "random")
"""A table's weight: rows times columns; columns; columns times ids of a batch; the product of both; none, so each table
is on any rank with the space."""


def greedy(
    tables: Sequence[TableConfig],
    demand: Demand,
    costs: RankCosts,
    rule: str,
    *,
    rank_bytes: float = float("inf"),
    seed: int = 0,
) -> Prediction:
    """The plan by a rule; of the two exchanges, all tables have the one that the costs say is faster.

    Raises:
        ValueError: a table that no rank has the space for, after those before it.
    """
    generator, ranks = np.random.default_rng(seed), costs.world_size
    weights = {table.name: _weight(rule, table, demand) for table in tables}
    load, free, places = np.zeros(ranks), np.full(ranks, float(rank_bytes)), dict[str, int]()
    for table in sorted(tables, key=lambda table: -weights[table.name]):
        size_bytes = size_bytes_of(table, Sharding("table_wise", (0,)), costs)[0]
        fitting = np.flatnonzero(free >= size_bytes)
        if not len(fitting):
            raise ValueError(f"no rank has the space for table {table.name!r}")
        rank = int(generator.choice(fitting) if rule == "random" else fitting[load[fitting].argmin()])
        load[rank] += weights[table.name]
        free[rank] -= size_bytes
        places[table.name] = rank
    plans = (
        Plan(ranks, {name: Sharding("table_wise", (rank,), exchange) for name, rank in places.items()})
        for exchange in get_args(Exchange)
    )
    return min((predict(tables, plan, demand, costs) for plan in plans), key=lambda found: found.seconds)


def _weight(rule: str, table: TableConfig, demand: Demand) -> float:
    dim, lookups = table.embedding_dim, demand.tables.get(table.name, TableDemand()).ids / demand.samples
    by_rule = {"size": table.num_embeddings * dim, "dim": dim, "lookups": lookups * dim, "random": 0.0}
    return by_rule.get(rule, table.num_embeddings * dim * lookups)
