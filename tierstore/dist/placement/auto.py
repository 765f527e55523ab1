"""A plan found where a model is sharded: by costs of the ranks that run now, and one rank's search for all."""

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from ...config import TableConfig
from ...errors import TableError
from ...trace import Trace
from ..plan import Sharding
from ..ranks import Ranks
from ..store import ShardedStore
from ..table import local_config
from .costs import Demand, RankCosts, TableDemand, demand_of
from .measure import measure_ranks
from .search import Search

_LOG: Final = logging.getLogger("tierstore")
_SECONDS: Final = 10.0
"""Of measured steps."""
_SAMPLES: Final = 1024
"""Of a rank's batch, where nothing is known of batches."""


def found_plan(
    store: ShardedStore, tables: Sequence[TableConfig], demand: Trace | None, costs: Any, rank_bytes: float
) -> dict[str, Sharding]:
    """The sharding of each table without dynamic ids; collective. Arguments and errors as of ``shard``. Tables of one
    optimizer are planned together, as costs are of one."""
    ranks, counted, found = store.ranks, [table for table in tables if table.ids is None], dict[str, Sharding]()
    with ranks.telling():
        if not isinstance(demand, Trace | None):
            raise TypeError(f"demand must be a Trace, as Store.record writes one, not {type(demand).__name__}")
    asked = _evenly(ranks, counted) if demand is None else demand_of(demand, counted, ranks.size)
    kinds: Any = dict.fromkeys(table.optimizer.kind for table in counted)
    for kind in kinds:
        if (known := costs) is None:
            if ranks.size != dist.get_world_size():
                raise ValueError('plan="auto" measures all ranks of torch.distributed: give costs= of the store\'s')
            if ranks.rank == 0:
                _LOG.warning("measuring for up to %d s what steps over these ranks cost; costs= has it", _SECONDS)
            known = measure_ranks(optimizer=kind, seconds=_SECONDS)
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
