"""In which order rows should lie so that those a batch misses share blocks: by how often they are read, and with what.

Rows read about as often as each other belong in one block: blocks of rows that are seldom read are then seldom
touched, and rows of one visitor or one item, which came up together, are neighbours by their first access. Beyond
that, a block is grown from the most frequent row that has no place yet: of the rows read at least two thirds as
often, the next is the one of whose accesses the largest part fell together with the block's, if that is more than
chance. So the work is linear in the trace. (Bandana refines blocks of equal size by social hash partitioning instead:
Eisenman et al., "Bandana: Using Non-Volatile Memory for Storing Deep Learning Models", 2019; Kabiljo et al., "Social
Hash Partitioner", 2017.)
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..kernels.arrays import Int32s, Int64s
from ..kernels.jit import kernel
from ..layout import KEY_ROW_BITS
from ..system.excerpt import excerpt
from ..trace import Trace

ACCESSES_A_ROW: Final = 32  # the last accesses of a row, by which its companions are found
WINDOW: Final = 32  # accesses before and after one, within its sample, that count as together with it
COUNT_RATIO: Final = 1.5
"""A companion is read at least one COUNT_RATIO-th as often as the row that the block is grown from."""
LIFT: Final = 4.0  # how many times more often than by chance a companion comes up with the block's rows


class Accesses(NamedTuple):
    """What was looked up, sample by sample."""

    keys: Int64s  # [n], in the order of access
    starts: Int64s  # [samples + 1]: sample s is ``keys[starts[s]:starts[s + 1]]``


def require_tables(trace: Trace, tables: Sequence[TableConfig]) -> None:
    """ValueError if the trace has no lookup, or is of other tables, or of rows that they do not have."""
    sizes = {config.name: config.num_embeddings for config in tables}
    for name, table in trace.tables.items():
        if name not in sizes:
            raise ValueError(f"the trace has a table {excerpt(name)} and the store has none of that name")
        if (most := int(table.ids.max(initial=-1))) >= sizes[name]:
            raise ValueError(f"the trace has row {most} of table {excerpt(name)}, which has {sizes[name]} rows")
    if not trace.num_lookups:
        raise ValueError("the trace has no lookup; without --trace the copy has rows in order of their numbers")


def table_accesses(trace: Trace, indexes: Mapping[str, int]) -> Accesses:
    """The lookups of some tables, entry by entry; ``indexes``: of the tables in the store, by name."""
    tables = {indexes[name]: table for name, table in trace.tables.items() if name in indexes}
    keys = [np.empty(0, np.int64), *((index << KEY_ROW_BITS) + table.ids for index, table in tables.items())]
    lengths = [np.diff(table.offsets) for table in tables.values()]
    samples = [np.empty(0, np.int64), *(np.repeat(np.arange(trace.num_entries), length) for length in lengths)]
    order = np.argsort(np.concatenate(samples), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.sum(lengths, axis=0, dtype=np.int64))])
    return Accesses(np.concatenate(keys)[order], starts)


class _Ranked(NamedTuple):
    keys: Int64s  # [rows], most frequent first, ties by first access
    counts: Int64s  # [rows]
    ranks: Int32s  # [n]: of each access, the place of its row in ``keys``


def _rank(keys: Int64s) -> _Ranked:
    rows, first, number, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    order = np.lexsort((first, -counts))
    rank = np.empty(len(rows), np.int32)
    rank[order] = np.arange(len(rows), dtype=np.int32)
    return _Ranked(rows[order], counts[order], rank[number.reshape(-1)])


def order_by_co_access(accesses: Accesses, rows_per_block: int) -> Int64s:
    """The distinct keys; each ``rows_per_block`` of them are a block."""
    ranked = _rank(accesses.keys)
    lengths = np.diff(accesses.starts)
    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.minimum(ranked.counts, ACCESSES_A_ROW)
    starts = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    last = _last_accesses(ranked.ranks, starts, kept.copy())
    order = _grow_blocks(
        ranked.ranks, accesses.starts, sample_of, ranked.counts, starts, last, rows_per_block, len(lengths)
    )
    return ranked.keys[order]


@kernel
def _last_accesses(ranks: Int32s, starts: Int64s, room: Int64s) -> Int64s:
    """Of row r, ``[starts[r]:starts[r + 1]]`` of the result: its last accesses. ``room``: how many; used up."""
    last = np.empty(starts[-1], np.int64)
    for i in range(len(ranks) - 1, -1, -1):
        row = ranks[i]
        if room[row] > 0:
            room[row] -= 1
            last[starts[row] + room[row]] = i
    return last


@kernel
def _grow_blocks(
    ranks: Int32s,
    sample_starts: Int64s,
    sample_of: Int64s,
    counts: Int64s,
    starts: Int64s,
    last: Int64s,
    rows_per_block: int,
    num_samples: int,
) -> Int64s:
    """int64 [rows], the rows' ranks in the order in which they are to lie; see the module's docstring."""
    num_rows = len(counts)
    order = np.empty(num_rows, np.int64)
    is_placed = np.zeros(num_rows, np.bool_)
    together = np.zeros(num_rows, np.int64)
    touched = np.empty(min(num_rows, rows_per_block * ACCESSES_A_ROW * 2 * WINDOW), np.int64)
    placed = 0
    first = 0  # rows before it have their places
    while placed < num_rows:
        num_touched = 0
        looked_at = 0
        seed = -1
        for room in range(min(rows_per_block, num_rows - placed), 0, -1):
            row = -1
            best = 0.0
            for k in range(num_touched):
                other = touched[k]
                share = together[other] / counts[other]
                if not is_placed[other] and share > best and share * num_samples > LIFT * looked_at:
                    best = share
                    row = other
            if row < 0:
                while is_placed[first]:
                    first += 1
                row = first
            if seed < 0:
                seed = row
            order[placed] = row
            placed += 1
            is_placed[row] = True
            if room == 1:
                break
            for k in range(starts[row], starts[row + 1]):
                at = last[k]
                looked_at += 1
                sample = sample_of[at]
                low = max(sample_starts[sample], at - WINDOW)
                for i in range(low, min(sample_starts[sample + 1], at + WINDOW + 1)):
                    other = ranks[i]
                    if not is_placed[other] and counts[other] * COUNT_RATIO >= counts[seed]:
                        if together[other] == 0:
                            touched[num_touched] = other
                            num_touched += 1
                        together[other] += 1
        for k in range(num_touched):
            together[touched[k]] = 0
    return order
