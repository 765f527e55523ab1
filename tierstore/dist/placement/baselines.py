"""Table-wise plans by the greedy rules that learned placement is compared with.

Each rule gives a table a weight; tables are dealt out, heaviest first, each to the rank with the least weight that has
the space. AutoShard (KDD 2022), DreamShard (NeurIPS 2022) and NeuroShard (MLSys 2023) compare with them.
"""

from collections.abc import Sequence
from typing import Final, Literal, get_args

import numpy as np

from ...config import TableConfig
from ...system.checks import require_choice
from ..plan import Exchange, Plan, Sharding
from .costs import Demand, RankCosts, TableDemand
from .search import Prediction, predict, size_bytes_of

Rule = Literal["size", "dim", "lookups", "size-lookups", "random"]
RULES: Final[tuple[Rule, ...]] = get_args(Rule)


def greedy(
    tables: Sequence[TableConfig],
    demand: Demand,
    costs: RankCosts,
    rule: Rule,
    *,
    rank_bytes: float = float("inf"),
    seed: int = 0,
) -> Prediction:
    """The plan by a rule; of the two exchanges, all tables have the one that the costs say is faster.

    Args:
        rule: a table's weight: "size": rows times columns. "dim": columns. "lookups": columns times ids of a batch.
            "size-lookups": the product of both. "random": each table on any rank with the space.
        rank_bytes: limit of each rank's rows with their optimizer state.
        seed: of "random".

    Raises:
        ValueError: another rule; a table that no rank has the space for, after those before it.
    """
    require_choice(rule, RULES, "rule")
    generator, ranks = np.random.default_rng(seed), costs.world_size
    weights = {
        table.name: _weight(rule, table, demand.tables.get(table.name, TableDemand()), demand.samples)
        for table in tables
    }
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


def _weight(rule: Rule, table: TableConfig, demand: TableDemand, samples: float) -> float:
    dim, lookups = table.embedding_dim, demand.ids / samples
    by_rule = {"size": table.num_embeddings * dim, "dim": dim, "lookups": lookups * dim, "random": 0.0}
    return by_rule.get(rule, table.num_embeddings * dim * lookups)
