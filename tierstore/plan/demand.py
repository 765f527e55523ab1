"""The demand: what a batch of a workload asks of the tiers, pool by pool; from a trace, or by formula."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..cache.ddr import resolve_policy
from ..layout import KEY_ROW_BITS, ROW_MASK, RowLayout
from ..settings.sections import nearest
from ..system.checks import excerpt
from .curves import POLICIES, MissRatioCurve, Popularity, curve, frequency_curve, lru_curve, popularity
from .traces import Accesses, of_tables, once_a_batch
from .workload import TableShape, Workload

RowsOf = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class PoolDemand:
    """Of the tables of one row layout, which share a cache."""

    layout: RowLayout
    tables: tuple[str, ...]
    num_rows: int
    lookups: float  # ids of a batch, on average
    unique: float  # distinct rows of them
    curve: MissRatioCurve  # of once-a-batch accesses, in rows of this pool
    rows_of: RowsOf | None = field(default=None, compare=False)  # distinct rows of one of so many parts of a batch

    def rows_of_a_part(self, parts: int) -> float:
        """Of ``rows_of``; where that is not known, the most that there can be."""
        if parts == 1 or self.rows_of is None:
            return min(self.unique, self.lookups / parts)
        return self.rows_of(parts)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Of all pools, for batches of so many samples; ``policy``: of the caches, as ``tierstore.open`` takes it."""

    batch_samples: int
    policy: str
    pools: tuple[PoolDemand, ...]

    @property
    def unique(self) -> float:
        """Distinct rows of a batch."""
        return sum(pool.unique for pool in self.pools)

    @classmethod
    def analytic(cls, workload: Workload, policy: str = "lru") -> "Demand":
        """By Zipf's law of each table, ids drawn independently; see ``analytic``. Of tinylfu and lfu the curve is that
        of a cache of the rows that are accessed most. ValueError: the policy has no formula."""
        formula = resolve_policy(policy)
        if formula not in POLICIES:
            raise ValueError(f"policy={excerpt(policy)} has no formula; expected one of {', '.join(POLICIES)}")

        def found(tables: list[TableShape]) -> dict[str, Any]:
            rows, samples = _popularity(tables, workload.batch_samples), workload.batch_samples
            return {
                "lookups": sum(samples * table.pooling_factor for table in tables),
                "unique": rows.unique,
                "curve": lru_curve(rows) if formula == "lru" else frequency_curve(rows, formula),
                "rows_of": lru_cache(lambda parts: _popularity(tables, samples / parts).unique),
            }

        return cls._of(workload, policy, found)

    @classmethod
    def from_accesses(
        cls,
        workload: Workload,
        accesses: Accesses,
        policy: str = "lru",
        *,
        make_curve: Callable[[Accesses, str], MissRatioCurve] = curve,
    ) -> "Demand":
        """As a trace has it, of every access, not once a batch only. Its batches are taken for those of the workload;
        the last may be a part of one, and averages leave it out if there are others and all are listed. ``make_curve``:
        called as ``curves.curve``. ValueError: it has no access, a table that the workload has not, or a row beyond."""
        _check(workload, accesses)
        size, never = np.ones(1, np.int64), np.zeros(1)
        unused = MissRatioCurve(  # of tables that nobody looks anything up in
            policy=resolve_policy(policy), sizes=size, miss_ratios=never, num_accesses=0, num_rows=0
        )

        def found(tables: list[TableShape]) -> dict[str, Any]:
            names = {table.name for table in tables}
            own = of_tables(accesses, [index for index, name in enumerate(accesses.tables) if name in names])
            distinct, lookups = once_a_batch(own), _lookups_a_batch(own)
            return {
                "lookups": lookups,
                "unique": min(lookups, _a_batch(distinct)),
                "curve": make_curve(distinct, policy) if len(distinct.keys) else unused,
                "rows_of": lru_cache(lambda parts: _a_batch(once_a_batch(split(own, parts))) if parts else 0.0),
            }

        return cls._of(workload, policy, found)

    @classmethod
    def _of(cls, workload: Workload, policy: str, found: Callable[[list[TableShape]], dict[str, Any]]) -> "Demand":
        """``found``: the other fields of a pool of these tables."""
        pools = tuple(
            PoolDemand(layout=layout, tables=names, num_rows=num_rows, **found(tables))
            for layout, (names, num_rows, tables) in _by_layout(workload).items()
        )
        return cls(batch_samples=workload.batch_samples, policy=policy, pools=pools)

    def laid_out(self, workload: Workload) -> "Demand":
        """The same, of rows of another type, or with another optimizer's state. ValueError: the tables, their rows or
        the batch are others than those that it was found of."""
        if workload.batch_samples != self.batch_samples:
            raise ValueError(
                f"the demand is of batches of {self.batch_samples:,} samples, the workload has "
                f"{workload.batch_samples:,}; find the demand of that workload"
            )
        layouts = _by_layout(workload)
        if [(pool.tables, pool.num_rows) for pool in self.pools] != [each[:2] for each in layouts.values()]:
            raise ValueError("the demand is of other tables than the workload's; find the demand of that workload")
        pools = tuple(replace(pool, layout=layout) for pool, layout in zip(self.pools, layouts, strict=True))
        return replace(self, pools=pools)


@lru_cache(maxsize=256)
def _by_layout(workload: Workload) -> dict[RowLayout, tuple[tuple[str, ...], int, list[TableShape]]]:
    """Names of the tables, their rows, and they."""
    found: dict[RowLayout, list[TableShape]] = {}
    for table in workload.tables:
        found.setdefault(workload.layout(table), []).append(table)
    return {
        layout: (tuple(each.name for each in own), sum(each.num_embeddings for each in own), own)
        for layout, own in found.items()
    }


def _popularity(tables: list[TableShape], samples: float) -> Popularity:
    return popularity([(table.num_embeddings, table.exponent, samples * table.pooling_factor) for table in tables])


def split(accesses: Accesses, parts: int) -> Accesses:
    """The same whose batches are equal parts of the batches that are listed, in their order."""
    starts = accesses.starts
    begins = starts[:-1, None] + np.diff(starts)[:, None] * np.arange(parts) // parts
    return accesses._replace(starts=np.append(begins.ravel(), starts[-1]), unlisted=parts * accesses.unlisted)


def _check(workload: Workload, accesses: Accesses) -> None:
    if not len(accesses.keys):
        raise ValueError("the trace has no access")
    rows = {table.name: table.num_embeddings for table in workload.tables}
    owners = accesses.keys >> KEY_ROW_BITS
    for index, name in enumerate(accesses.tables):
        if name not in rows:
            known = nearest(name, rows, all_are="its tables are")
            raise ValueError(f"the trace has table {excerpt(name)}, the workload has not; {known}")
        own = accesses.keys[owners == index]
        highest = int(own.max() & ROW_MASK) if len(own) else 0
        if highest >= rows[name]:
            raise ValueError(f"the trace has row {highest:,} of table {excerpt(name)}, which has {rows[name]:,} rows")


def _lookups_a_batch(accesses: Accesses) -> float:
    """Of all rows, on average. If they were counted, the sample says only how much of them is of the last batch."""
    counted, sampled = accesses.all_lookups, len(accesses.keys)
    if counted is None:
        return _a_batch(accesses)
    if not sampled:
        return sum(counted) / max(accesses.all_batches, 1)
    return _a_batch(accesses) * sum(counted) * accesses.sampling_rate / sampled


def _a_batch(accesses: Accesses) -> float:
    """Accesses of a batch, on average, of all rows."""
    starts = accesses.starts[:-1] if accesses.num_batches > 1 and not accesses.unlisted else accesses.starts
    return float(starts[-1] - starts[0]) / (len(starts) - 1 + accesses.unlisted) / accesses.sampling_rate
