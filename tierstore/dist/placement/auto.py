"""A plan found where a model is sharded: by costs of the ranks that run now, and one rank's search for all."""

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from ...config import TableConfig
from ...errors import TableError
from ...trace import TableTrace, Trace
from ..plan import Sharding
from ..ranks import Ranks
from ..store import ShardedStore
from ..table import local_config
from .costs import Demand, RankCosts, TableDemand, demand_of
from .search import Search

_LOG: Final = logging.getLogger("tierstore")
_SECONDS: Final = 10.0
"""Of measured steps."""
_SAMPLES: Final = 1024
"""Of a rank's batch, where nothing is known of batches."""


def found_plan(
    store: ShardedStore, tables: Sequence[TableConfig], demand: Any, costs: Any, rank_bytes: float
) -> dict[str, Sharding]:
    """The sharding of each table without dynamic ids; collective. Arguments and errors as of ``shard``. Tables of one
    optimizer are planned together, as costs are of one."""
    ranks, counted, found = store.ranks, [table for table in tables if table.ids is None], dict[str, Sharding]()
    if isinstance(demand, Trace):
        asked = demand_of(demand, counted, ranks.size)
    else:
        asked = _evenly(ranks, counted) if demand is None else _of_batches(ranks, counted, list(demand))
    for kind in dict.fromkeys(table.optimizer.kind for table in counted):
        known = _measured(ranks, kind) if costs is None else costs
        with ranks.telling():
            if ranks.rank == 0:
                known = known if isinstance(known, RankCosts) else RankCosts.load(known)
                if known.world_size != ranks.size:
                    raise ValueError(f"the costs are of {known.world_size} ranks, and there are {ranks.size}")
                own = [table for table in counted if table.optimizer.kind == kind]
                best = Search(own, asked, known, rank_bytes=rank_bytes).best()
                found |= {table.name: _possible(store, table, best.plan.tables[table.name]) for table in own}
                rank_bytes -= float(best.size_bytes.max())
    return ranks.gather(found, "shard")[0]


def _measured(ranks: Ranks, kind: Any) -> RankCosts:
    from .measure import measure_ranks  # which has modules over stores

    if ranks.size != dist.get_world_size():
        raise ValueError('plan="auto" measures all ranks of torch.distributed, and the store has some: give costs=')
    if ranks.rank == 0:
        _LOG.warning("measuring for up to %d s what steps over these ranks cost; costs= has it from a file", _SECONDS)
    return measure_ranks(optimizer=kind, seconds=_SECONDS)


def _possible(store: ShardedStore, table: TableConfig, sharding: Sharding) -> Sharding:
    """It, or by rows where the table cannot be sharded so."""
    try:
        store.local.find_or_require(local_config(table, sharding, store.ranks.rank))
    except (ValueError, TableError):
        return Sharding("row_wise", tuple(range(store.ranks.size)))
    return sharding


def _evenly(ranks: Ranks, tables: Sequence[TableConfig]) -> Demand:
    """One id a feature, all rows alike."""
    found = {}
    for table in tables:
        rows, ids = table.num_embeddings, _SAMPLES * len(table.feature_names)
        own, of_all = (rows * -np.expm1(count * np.log1p(-1 / (rows + 1))) for count in (ids, ids * ranks.size))
        found[table.name] = TableDemand(ids, own, of_all)
    return Demand(_SAMPLES, found)


def _of_batches(ranks: Ranks, tables: Sequence[TableConfig], batches: Sequence[Any]) -> Demand:
    """Of each rank's batches; collective."""
    with ranks.telling():
        if not batches:
            raise ValueError("demand has no batch: give some, or leave it out")
        samples = sum(batch.stride() for batch in batches) / len(batches)
        own = [
            [torch.cat([lists[name].values() for name in table.feature_names]).long().numpy() for table in tables]
            for lists in (batch.to_dict() for batch in batches)
        ]
    every = ranks.gather((samples, own), "shard")
    if len(counts := {len(of_rank) for _, of_rank in every}) > 1:
        raise ValueError(f"demand has {sorted(counts)} batches on different ranks: give each as many")
    traces = {}
    for place, table in enumerate(tables):  # an entry is what one rank's batch looks up
        parts = [batch[place] for of_ranks in zip(*(each for _, each in every), strict=True) for batch in of_ranks]
        offsets = np.append(0, np.cumsum([len(part) for part in parts]))
        traces[table.name] = TableTrace(np.concatenate(parts), offsets)
    demand = demand_of(Trace(tables=traces, batch_samples=ranks.size), tables, ranks.size)
    return demand._replace(samples=float(np.mean([samples for samples, _ in every])))
