"""What one step asks of each table, over so many ranks."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import Float64s
from ...rows import ROW_MASK
from ..accesses import Accesses, of_tables, once_a_batch
from ..analytic import popularity
from ..demand import split
from ..workload import Workload

_RANGES: Final = 64
_EVENLY: Final = np.ones(1)


class TableDemand(NamedTuple):
    """Of one table in a step, on average.

    Attributes:
        ids: of a rank's batch. rows: distinct ones of it. all_rows: distinct ones of all ranks' batches.
        hot_ids, hot_rows: float64 [n], how ``ids`` and ``rows`` are divided among as many equal ranges of the table's
            rows; of any sum.
    """

    ids: float
    rows: float
    all_rows: float
    hot_ids: Float64s = _EVENLY
    hot_rows: Float64s = _EVENLY


def shares_of(hot: Float64s, count: int) -> Float64s:
    """float64 [count], of the first, second... of so many equal ranges of a table's rows."""
    known = np.append(0.0, hot.cumsum())
    places = np.linspace(0, len(hot), count + 1)
    found: Float64s = np.diff(np.interp(places, np.arange(len(known)), known)) / max(known[-1], 1e-300)
    return found


Demands = Mapping[str, TableDemand]


def expected_demand(workload: Workload, ranks: int) -> dict[str, TableDemand]:
    """By each table's pooling factor and Zipf's law of its exponent, popular rows anywhere in the table."""
    found = {}
    for table in workload.tables:
        lookups = workload.batch_samples * table.pooling_factor
        own, all_rows = (
            popularity([(table.num_embeddings, table.exponent, each)]).unique for each in (lookups / ranks, lookups)
        )
        found[table.name] = TableDemand(lookups / ranks, own, all_rows)
    return found


def measured_demand(workload: Workload, accesses: Accesses, ranks: int) -> dict[str, TableDemand]:
    """Means over the batches of accesses, which are taken for those of all ranks: each rank has an equal part of the
    ids, in their order. Nothing is looked up in a table that is not in them."""
    found = {table.name: TableDemand(0.0, 0.0, 0.0) for table in workload.tables}
    rows_of = {table.name: table.num_embeddings for table in workload.tables}
    weight = accesses.all_batches * accesses.sampling_rate
    for index, name in enumerate(accesses.tables):
        if name not in found:
            continue
        own = of_tables(accesses, [index])
        ids = len(own.keys) / weight if own.all_lookups is None else sum(own.all_lookups) / own.all_batches
        of_ranks = once_a_batch(split(own, ranks)).keys
        hot_ids, hot_rows = (
            np.bincount((keys & ROW_MASK) * _RANGES // rows_of[name], minlength=_RANGES).astype(np.float64)
            for keys in (own.keys, of_ranks)
        )
        all_rows = min(ids, len(once_a_batch(own).keys) / weight)
        found[name] = TableDemand(ids / ranks, min(ids, len(of_ranks) / weight) / ranks, all_rows, hot_ids, hot_rows)
    return found
