"""Table-wise plans by the greedy rules that AutoShard (KDD 2022), DreamShard (NeurIPS 2022) and NeuroShard (MLSys 2023)
compare with: tables are dealt out, heaviest first, each to the rank with the least weight that has the space."""

from collections.abc import Sequence
from typing import Final, get_args

import numpy as np

from tierstore import TableConfig
from tierstore.dist import Plan, Sharding
from tierstore.dist.placement import Demand, Prediction, RankCosts, TableDemand, predict
from tierstore.dist.placement.search import size_bytes_of
from tierstore.dist.plan import Exchange

RULES: Final = ("size", "dim", "lookups", "size-lookups", "random")


def greedy(
    tables: Sequence[TableConfig], demand: Demand, costs: RankCosts, rule: str, *, rank_bytes: float = float("inf"),
    seed: int = 0,
) -> Prediction:  # fmt: skip
    """The plan by a rule; of the two exchanges, all tables have the one that the costs say is faster. ValueError: no
    rank has the space for a table, after those before it.

    Args:
        rule: a table's weight: "size": rows times columns. "dim": columns. "lookups": columns times ids of a batch.
            "size-lookups": the product of both. "random": each table on any rank with the space.
        rank_bytes: limit of each rank's rows with their optimizer state. seed: of "random".
    """
    generator, ranks, weights = np.random.default_rng(seed), costs.world_size, dict[str, float]()
    for table in tables:
        rows, dim = table.num_embeddings, table.embedding_dim
        lookups = demand.tables.get(table.name, TableDemand()).ids / demand.samples * dim
        by_rule = {"size": rows * dim, "dim": dim, "lookups": lookups, "size-lookups": rows * lookups, "random": 0.0}
        weights[table.name] = by_rule[rule]
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
