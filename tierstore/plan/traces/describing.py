"""What is in a trace: sizes, and how uneven its rows' popularity is."""

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64s
from ...layout import KEY_ROW_BITS
from ...system.excerpt import excerpt
from ...system.terminal import columns_of
from ...trace import Trace
from ..accesses import accesses_of
from ..json_file import plain

_TOP_SHARE: Final = 100
_MAX_SHOWN, _MAX_NAME = 40, 24


class TableSummary(NamedTuple):
    """Of one table, or of all.

    Attributes:
        accesses: to the rows that are in the trace.
        all_accesses: to all rows, whether in it or not; None where it is a sample that does not say.
        rows: distinct ones that are used.
        ids_a_sample: on average.
        top_share: of the accesses, by the hundredth of the used rows that is used most.
        used_once: rows that are used once.
    """

    name: str
    accesses: int
    all_accesses: int | None
    rows: int
    ids_a_sample: float
    top_share: float
    used_once: int


class TraceSummary(NamedTuple):
    """Of a trace; ``sampling_rate``: of the rows that are in it. Counts are of these, unless they say otherwise."""

    total: TableSummary
    tables: tuple[TableSummary, ...]
    batches: int
    samples: int
    sampling_rate: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = plain(self)
        return found

    def text(self) -> str:
        """Lines for a terminal; the tables with the most accesses."""
        total, rate = self.total, self.sampling_rate
        counts = f"tables: {len(self.tables):,}, batches: {self.batches:,}, samples: {self.samples:,}"
        lines = [f"{total.accesses:,} accesses of {total.rows:,} rows; {counts}"]
        if rate < 1:
            every = "" if total.all_accesses is None else f", and {total.all_accesses:,} accesses"
            lines.append(f"a sample: {100 * rate:g} % of the rows; all have about {round(total.rows / rate):,}{every}")
        rows = [["table", "accesses", "rows", "ids/sample", "top 1 %", "used once", "all accesses"]]
        largest = sorted(self.tables, key=lambda table: table.accesses, reverse=True)
        for each in [*largest[:_MAX_SHOWN], total]:
            name, used_once = excerpt(each.name, _MAX_NAME - 3).replace("'", ""), each.used_once / max(1, each.rows)
            shares = (f"{100 * each.top_share:.1f} %", f"{100 * used_once:.1f} %")
            of_all = "" if each.all_accesses is None else f"{each.all_accesses:,}"
            rows.append([name, f"{each.accesses:,}", f"{each.rows:,}", f"{each.ids_a_sample:,.4g}", *shares, of_all])
        if rate == 1 or total.all_accesses is None:
            rows = [row[:-1] for row in rows]
        shown = columns_of(rows, is_last_text=False)
        if len(largest) > _MAX_SHOWN:
            shown.insert(-1, f"... and {len(largest) - _MAX_SHOWN} tables with fewer accesses")
        explained = "top 1 %: share of the accesses by the 1 % of its used rows that are used most"
        return "\n".join([*lines, "", *shown, explained])


def describe(trace: Trace) -> TraceSummary:
    """Count. Some 40 bytes of memory an access while it counts."""
    accesses, counted = accesses_of(trace), trace.all_lookups
    keys, uses = np.unique(accesses.keys, return_counts=True)
    ends = np.searchsorted(keys, (np.arange(len(accesses.tables) + 1) << KEY_ROW_BITS)).tolist()
    tables = tuple(
        _summary(trace, name, uses[begin:end], None if counted is None else counted[index])
        for index, (name, (begin, end)) in enumerate(zip(accesses.tables, pairwise(ends), strict=True))
    )
    total = _summary(trace, "all", uses, None if counted is None else sum(counted))
    return TraceSummary(total, tables, accesses.all_batches, trace.num_samples, trace.sampling_rate)


def _summary(trace: Trace, name: str, uses: Int64s, counted: int | None) -> TableSummary:
    """``counted``: accesses to all rows, where they are known apart."""
    accesses = int(uses.sum())
    return TableSummary(
        name=name,
        accesses=accesses,
        all_accesses=accesses if counted is None and trace.sampling_rate == 1 else counted,
        rows=len(uses),
        ids_a_sample=accesses / max(1, trace.num_samples),
        top_share=int(np.sort(uses)[::-1][: -(-len(uses) // _TOP_SHARE)].sum()) / max(1, accesses),
        used_once=int(np.count_nonzero(uses == 1)),
    )
