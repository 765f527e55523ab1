"""What is in a trace: sizes, and how uneven its rows' popularity is."""

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...rows import KEY_ROW_BITS
from ...system.excerpt import excerpt
from ...system.terminal import columns_of
from ...trace import Trace
from ..accesses import accesses_of
from ..json_file import plain

_TOP_SHARE: Final = 100
_MAX_SHOWN: Final = 40
_MAX_NAME: Final = 24
_WHOLE: Final = 1000


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
    """Of a trace.

    Attributes:
        sampling_rate: of the rows that are in the trace; counts are of these alone, if they are not named otherwise.
    """

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
        """Lines for a terminal."""
        total = self.total
        lines = [
            f"{total.accesses:,} accesses of {total.rows:,} rows in {_counted(len(self.tables), 'table')}, "
            f"{_counted(self.batches, 'batch', 'batches')}, {self.samples:,} samples"
        ]
        if self.sampling_rate < 1:
            lines.append(
                f"a sample: {100 * self.sampling_rate:g} % of the rows; all have about "
                f"{round(total.rows / self.sampling_rate):,}"
                + ("" if total.all_accesses is None else f", and {total.all_accesses:,} accesses")
            )
        return "\n".join([*lines, "", *self._table_lines()])

    def _table_lines(self) -> list[str]:
        is_counted = self.sampling_rate < 1 and self.total.all_accesses is not None
        heads = ["table", "accesses", "rows", "ids/sample", "top 1 %", "used once"]
        rows = [[*heads, *(["all accesses"] if is_counted else [])]]
        largest = sorted(self.tables, key=lambda table: table.accesses, reverse=True)
        for table in [*(largest[:_MAX_SHOWN]), self.total]:
            ids, counts = table.ids_a_sample, (_shown(table.name), f"{table.accesses:,}", f"{table.rows:,}")
            shares = (f"{100 * table.top_share:.1f} %", f"{100 * table.used_once / max(1, table.rows):.1f} %")
            all_accesses = [f"{table.all_accesses:,}"] if is_counted else []
            rows.append([*counts, f"{ids:,.0f}" if ids >= _WHOLE else f"{ids:.4g}", *shares, *all_accesses])
        lines = columns_of(rows, is_last_text=False)
        if len(largest) > _MAX_SHOWN:
            lines.insert(-1, f"... and {len(largest) - _MAX_SHOWN} tables with fewer accesses")
        lines.append("top 1 %: share of the accesses by the 1 % of its used rows that are used most")
        return lines


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _shown(name: str) -> str:
    """Names come from files."""
    return excerpt(name, _MAX_NAME - 3).replace("'", "")


def describe(trace: Trace) -> TraceSummary:
    """Count. Some 40 bytes of memory an access while it counts."""
    accesses, counted = accesses_of(trace), trace.all_lookups
    keys, uses = np.unique(accesses.keys, return_counts=True)
    uses = uses.astype(np.int64)
    ends = np.searchsorted(keys, (np.arange(len(accesses.tables) + 1) << KEY_ROW_BITS))
    samples, rate = trace.num_samples, trace.sampling_rate
    tables = tuple(
        _summary(name, uses[begin:end], samples, rate, None if counted is None else counted[number])
        for number, (name, (begin, end)) in enumerate(zip(accesses.tables, pairwise(ends.tolist()), strict=True))
    )
    total = _summary("all", uses, samples, rate, None if counted is None else sum(counted))
    return TraceSummary(total, tables, accesses.all_batches, samples, rate)


def _summary(name: str, uses: NDArray[np.int64], samples: int, rate: float, counted: int | None) -> TableSummary:
    """``counted``: accesses to all rows, where they are known apart."""
    accesses = int(uses.sum())
    top = -(-len(uses) // _TOP_SHARE)
    top_uses = int(np.partition(uses, len(uses) - top)[len(uses) - top :].sum()) if top else 0
    return TableSummary(
        name=name,
        accesses=accesses,
        all_accesses=accesses if counted is None and rate == 1 else counted,
        rows=len(uses),
        ids_a_sample=accesses / max(1, samples),
        top_share=top_uses / max(1, accesses),
        used_once=int(np.count_nonzero(uses == 1)),
    )
