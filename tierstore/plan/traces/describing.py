"""What is in a trace: sizes, how uneven its rows' popularity is, how often they are used again."""

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...rows import KEY_ROW_BITS
from ...system.excerpt import excerpt
from ...system.terminal import columns_of
from ...trace import Trace
from ..accesses import Accesses, accesses_of
from ..json_file import plain

HISTOGRAM_LOWS: Final = (0, *(1 << power for power in range(16)))
"""Bins of Meta's published histograms: (0, 1], (1, 2], (2, 4], ... and above 32,768."""
_TOP_SHARE: Final = 100
_MAX_SHOWN: Final = 40
_MAX_NAME: Final = 24
_WHOLE: Final = 1000


class ReuseBin(NamedTuple):
    """Rows that are used more than ``low`` and at most ``high`` times; None: without a limit.

    ``rows`` and ``accesses`` are shares of all.
    """

    low: int
    high: int | None
    rows: float
    accesses: float


class TableSummary(NamedTuple):
    """Of one table, or of all.

    Attributes:
        accesses: to the rows that are in the trace.
        all_accesses: to all rows, whether in it or not; None where it is a sample that does not say.
        rows: distinct ones that are used.
        ids_a_batch: on average.
        ids_a_sample: the same; None where samples are not known.
        top_share: of the accesses, by the hundredth of the used rows that is used most.
        used_once: rows that are used once.
        reuse: by how often rows are used.
    """

    name: str
    accesses: int
    all_accesses: int | None
    rows: int
    ids_a_batch: float
    ids_a_sample: float | None
    top_share: float
    used_once: int
    reuse: tuple[ReuseBin, ...]


class TraceSummary(NamedTuple):
    """Of a trace.

    Attributes:
        samples: None where they are not known.
        sampling_rate: of the rows that are in the trace; counts are of these alone, if they are not named otherwise.
    """

    total: TableSummary
    tables: tuple[TableSummary, ...]
    batches: int
    samples: int | None
    sampling_rate: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = plain(self)
        return found

    def text(self) -> str:
        """Lines for a terminal."""
        total = self.total
        samples = "" if self.samples is None else f", {self.samples:,} samples"
        lines = [
            f"{total.accesses:,} accesses of {total.rows:,} rows in {_counted(len(self.tables), 'table')}, "
            f"{_counted(self.batches, 'batch', 'batches')}{samples}"
        ]
        if self.sampling_rate < 1:
            lines.append(
                f"a sample: {100 * self.sampling_rate:g} % of the rows; all have about "
                f"{round(total.rows / self.sampling_rate):,}"
                + ("" if total.all_accesses is None else f", and {total.all_accesses:,} accesses")
            )
        return "\n".join([*lines, "", *self._table_lines(), "", *_reuse_lines(total)])

    def _table_lines(self) -> list[str]:
        per = "batch" if self.samples is None else "sample"
        is_counted = self.sampling_rate < 1 and self.total.all_accesses is not None
        heads = ["table", "accesses", "rows", f"ids/{per}", "top 1 %", "used once"]
        rows = [[*heads, *(["all accesses"] if is_counted else [])]]
        largest = sorted(self.tables, key=lambda table: table.accesses, reverse=True)
        for table in [*(largest[:_MAX_SHOWN]), self.total]:
            ids = table.ids_a_batch if table.ids_a_sample is None else table.ids_a_sample
            counts = (_shown(table.name), f"{table.accesses:,}", f"{table.rows:,}")
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


def _reuse_lines(total: TableSummary) -> list[str]:
    table = [("uses of a row", "rows", "accesses")]
    last = max((number for number, each in enumerate(total.reuse) if each.accesses), default=0)
    for low, high, rows, accesses in total.reuse[: last + 1]:
        name = f"more than {low:,}" if high is None else f"{high:,}" if high == low + 1 else f"{low + 1:,} to {high:,}"
        table.append((name, f"{100 * rows:.1f} %", f"{100 * accesses:.1f} %"))
    return columns_of(table, is_last_text=False)


def describe(source: Accesses | Trace) -> TraceSummary:
    """Count. Some 40 bytes of memory an access while it counts.

    Samples are known of a ``Trace`` alone: accesses have batches.
    """
    samples = source.num_samples if isinstance(source, Trace) else None
    counted = source.all_lookups
    accesses = accesses_of(source) if isinstance(source, Trace) else source
    keys, uses = np.unique(accesses.keys, return_counts=True)
    uses = uses.astype(np.int64)
    ends = np.searchsorted(keys, (np.arange(len(accesses.tables) + 1) << KEY_ROW_BITS))
    batches, rate = accesses.all_batches, accesses.sampling_rate
    tables = tuple(
        _summary(name, uses[begin:end], batches, samples, rate, None if counted is None else counted[number])
        for number, (name, (begin, end)) in enumerate(zip(accesses.tables, pairwise(ends.tolist()), strict=True))
    )
    total = _summary("all", uses, batches, samples, rate, None if counted is None else sum(counted))
    return TraceSummary(total, tables, batches, samples, rate)


def _summary(
    name: str, uses: NDArray[np.int64], batches: int, samples: int | None, rate: float, counted: int | None
) -> TableSummary:
    """``counted``: accesses to all rows, where they are known apart."""
    accesses = int(uses.sum())
    top = -(-len(uses) // _TOP_SHARE)
    top_uses = int(np.partition(uses, len(uses) - top)[len(uses) - top :].sum()) if top else 0
    return TableSummary(
        name=name,
        accesses=accesses,
        all_accesses=accesses if counted is None and rate == 1 else counted,
        rows=len(uses),
        ids_a_batch=accesses / max(1, batches),
        ids_a_sample=None if samples is None else accesses / max(1, samples),
        top_share=top_uses / max(1, accesses),
        used_once=int(np.count_nonzero(uses == 1)),
        reuse=reuse_histogram(uses),
    )


def reuse_histogram(uses: NDArray[np.int64]) -> tuple[ReuseBin, ...]:
    """Of the uses of each row, int64 [rows], 1 or more; all shares are 0 where there is no row."""
    lows = np.array(HISTOGRAM_LOWS)
    bins = np.searchsorted(lows, uses, side="left") - 1
    rows = np.bincount(bins, minlength=len(lows)) / max(1, len(uses))
    accesses = np.bincount(bins, weights=uses, minlength=len(lows)) / max(1, int(uses.sum()))
    highs = (*HISTOGRAM_LOWS[1:], None)
    return tuple(
        ReuseBin(low, high, float(row_share), float(access_share))
        for low, high, row_share, access_share in zip(HISTOGRAM_LOWS, highs, rows, accesses, strict=True)
    )
