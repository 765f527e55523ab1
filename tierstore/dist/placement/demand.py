"""What one step asks of each table, over several ranks: counted in a trace."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ...config import TableConfig
from ...kernels.arrays import Float64s, Int64s
from ...system.excerpt import excerpt
from ...trace import Trace

_RANGES: Final = 64
_EVENLY: Final = np.ones(1)


class TableDemand(NamedTuple):
    """Of one table in a step, on average.

    Attributes:
        ids: of a rank's batch. rows: distinct ones of it. all_rows: distinct ones of all ranks' batches.
        hot_ids, hot_rows: float64 [n], how ``ids`` and ``rows`` are divided among n equal ranges of the table's rows;
            of any sum.
    """

    ids: float = 0.0
    rows: float = 0.0
    all_rows: float = 0.0
    hot_ids: Float64s = _EVENLY
    hot_rows: Float64s = _EVENLY


class Demand(NamedTuple):
    """Of a step over several ranks.

    Attributes:
        samples: of a rank's batch. tables: by name; a table that is not there is not looked up.
    """

    samples: float
    tables: Mapping[str, TableDemand]


def shares_of(hot: Float64s, count: int) -> Float64s:
    """float64 [count]: the shares of the first, second... of ``count`` equal ranges of a table's rows."""
    known = np.append(0.0, hot.cumsum())
    places = np.linspace(0, len(hot), count + 1)
    found: Float64s = np.diff(np.interp(places, np.arange(len(known)), known)) / max(known[-1], 1e-300)
    return found


def demand_of(trace: Trace, tables: Sequence[TableConfig], ranks: int) -> Demand:
    """Means over a trace's batches, each the batch of all ranks: rank r has its r-th equal part.

    Tables are found by name; others of the trace are left out.

    Raises:
        ValueError: the trace has a row that its table lacks.
    """
    bounds, num_rows = trace.batch_bounds, {table.name: table.num_embeddings for table in tables}
    # A recording of sampled rows leaves out batches of which it has none.
    batches = trace.all_batches or max(len(bounds) - 1, round(trace.num_samples / trace.batch_samples), 1)
    weight, found = batches * trace.sampling_rate, dict[str, TableDemand]()
    for index, (name, table) in enumerate(trace.tables.items()):
        if name not in num_rows:
            continue
        if table.ids.max(initial=-1) >= num_rows[name]:
            raise ValueError(
                f"table {excerpt(name)} has {num_rows[name]:,} rows, and the trace looks up row {table.ids.max():,}; "
                "give the tables that the trace is of"
            )
        ids = len(table.ids) / weight if trace.all_lookups is None else trace.all_lookups[index] / batches
        hot_ids, hot_rows = np.zeros(_RANGES), np.zeros(_RANGES)
        all_rows = 0
        for first, last in itertools.pairwise(bounds.tolist()):
            all_rows += len(np.unique(table.ids[table.offsets[first] : table.offsets[last]]))
            for own in _parts(table.ids, table.offsets, first, last, ranks):
                for hot, rows in ((hot_ids, own), (hot_rows, np.unique(own))):
                    hot += np.bincount(rows * _RANGES // num_rows[name], minlength=_RANGES)
        rows_of_ranks = min(ids, hot_rows.sum() / weight)
        found[name] = TableDemand(ids / ranks, rows_of_ranks / ranks, min(ids, all_rows / weight), hot_ids, hot_rows)
    return Demand(trace.batch_samples / ranks, found)


def _parts(ids: Int64s, offsets: Int64s, first: int, last: int, ranks: int) -> list[Int64s]:
    """The ids of each rank: of an equal part of the batch's samples or, where an entry is a whole batch, of the ids."""
    if last - first >= ranks:
        cuts = offsets[np.arange(ranks + 1) * (last - first) // ranks + first]
    else:
        cuts = np.arange(ranks + 1) * (offsets[last] - offsets[first]) // ranks + offsets[first]
    return [ids[start:stop] for start, stop in itertools.pairwise(cuts)]
