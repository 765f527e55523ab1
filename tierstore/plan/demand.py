"""The demand: what a batch of a workload asks of the tiers, pool by pool; from a trace, or by formula. Then rows of a
budget, by the store's own rule (``pools.divide``), and what each tier has of what it is asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..cache.ddr import POLICIES, resolve_policy
from ..cache.tinylfu import MOVED_MAX, MOVED_SHARE
from ..errors import BudgetError
from ..hbm.cache import HbmSize
from ..io.log import DEFAULT_SLACK
from ..io.segments import geometry
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, PAIR_WORDS, ROW_MASK, RowLayout
from ..pool.leases import HELD_SHARE
from ..pool.writeback import rows_a_write
from ..settings.sections import nearest
from ..store.pools import Division, PoolSize, divide, divide_hbm
from ..system.checks import excerpt, require_choice
from .curves import MissRatioCurve, Popularity, curve, frequency_curve, lru_curve, popularity
from .host import Setup
from .traces import Accesses, of_tables, once_a_batch
from .workload import TableShape, Workload

_BY_COUNT: Final = {"lfu": 0, "tinylfu": MOVED_MAX}
"""Policies whose next victim is mostly a dirty row of a batch shortly before. Those that are used again before they are
evicted are written twice, which is left out. Rows that become victims together are written together, up to so many."""
_HALVINGS: Final = 24
_MOST_CACHED: Final = 0.999
FILE_SHARE: Final = 1.05  # of a file, over the bytes of its segments: the tree above them, and free pages
ID_LAYOUT: Final = RowLayout(dim=4)  # of rows that keep ids
_Tables = tuple[TableShape, ...]
_Counts = tuple[tuple[RowLayout, int], ...]


@dataclass(frozen=True, kw_only=True)
class PoolDemand:
    """Of the tables of one row layout, which share a cache."""

    tables: tuple[TableShape, ...]
    lookups: float  # ids of a batch, on average
    unique: float  # distinct rows of them
    curve: MissRatioCurve  # of once-a-batch accesses, in rows of this pool
    rows_of: Callable[[int], float] = field(compare=False)  # distinct rows of one of so many parts of a batch


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Of all pools, for batches of so many samples; ``policy``: of the caches, as ``tierstore.open`` takes it."""

    batch_samples: int
    policy: str
    pools: tuple[PoolDemand, ...]

    @classmethod
    def analytic(cls, workload: Workload, policy: str = "lru") -> "Demand":
        """By Zipf's law of each table, ids drawn independently. Of tinylfu and lfu the curve is that of a cache of the
        rows that are accessed most. ValueError: there is no such policy."""
        require_choice(policy, POLICIES, "policy")
        formula, samples = resolve_policy(policy), workload.batch_samples

        def found(tables: _Tables) -> dict[str, Any]:
            rows = _popularity(tables, samples)
            return {
                "lookups": sum(samples * table.pooling_factor for table in tables),
                "unique": rows.unique,
                "curve": lru_curve(rows) if formula == "lru" else frequency_curve(rows, formula),
                "rows_of": lru_cache(lambda parts: _popularity(tables, samples / parts).unique),
            }

        return cls._of(workload, policy, found)

    @classmethod
    def from_accesses(cls, workload: Workload, accesses: Accesses, policy: str = "lru", **options: Any) -> "Demand":
        """As a trace has it, of every access, not once a batch only. Its batches are taken for those of the workload;
        the last may be a part of one, and averages leave it out if there are others and all are listed. ``options``: of
        ``curves.curve``. ValueError: it has no access, a table that the workload has not, or a row beyond."""
        _check(workload, accesses)

        def found(tables: _Tables) -> dict[str, Any]:
            names = {table.name for table in tables}
            own = of_tables(accesses, [index for index, name in enumerate(accesses.tables) if name in names])
            distinct, lookups = once_a_batch(own), _lookups_a_batch(own)
            is_used = len(distinct.keys) > 0
            return {
                "lookups": lookups,
                "unique": min(lookups, _a_batch(distinct)),
                "curve": curve(distinct, policy, **options) if is_used else lru_curve(_popularity(tables, 0.0)),
                "rows_of": lru_cache(lambda parts: _a_batch(once_a_batch(split(own, parts)))),
            }

        return cls._of(workload, policy, found)

    @classmethod
    def _of(cls, workload: Workload, policy: str, found: Callable[[_Tables], dict[str, Any]]) -> "Demand":
        """``found``: the other fields of a pool of these tables."""
        pools = tuple(PoolDemand(tables=tables, **found(tables)) for tables in _by_layout(workload).values())
        return cls(batch_samples=workload.batch_samples, policy=policy, pools=pools)


@lru_cache(maxsize=256)
def _by_layout(workload: Workload) -> dict[RowLayout, _Tables]:
    found: dict[RowLayout, list[TableShape]] = {}
    for table in workload.tables:
        found.setdefault(workload.layout(table), []).append(table)
    return {layout: tuple(tables) for layout, tables in found.items()}


def pool_rows(setup: Setup, demand: Demand) -> _Counts:
    """Of each pool: how its rows lie, by the setup's types and optimizer, and how many a host has. ValueError: the
    demand is of other tables, or batches, than the setup."""
    workload, layouts = setup.workload, _by_layout(setup.workload)
    if workload.batch_samples != demand.batch_samples:
        raise ValueError(
            f"the demand is of batches of {demand.batch_samples:,} samples, the workload has "
            f"{workload.batch_samples:,}; find the demand of that workload"
        )
    if [pool.tables for pool in demand.pools] != [*layouts.values()]:
        raise ValueError("the demand is of other tables than the workload's; find the demand of that workload")
    counts = (sum(table.num_embeddings for table in tables) for tables in layouts.values())
    return tuple((layout, -(-count // setup.parts)) for layout, count in zip(layouts, counts, strict=True))


def _popularity(tables: _Tables, samples: float) -> Popularity:
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


class PoolLoad(NamedTuple):
    """One pool of one host, or of one worker, in one step or query."""

    layout: RowLayout
    num_rows: int  # that the host has of it, on SSD
    lookups: float
    bags: float  # lists of ids, one a sample and table
    unique: float  # distinct rows of the ids
    sent_rows: float  # distinct rows of a host's own part of the batch; of one host ``unique``
    asked: float  # of the highest tier: ``unique``, twice where backward has to fetch them again
    hbm_rows: int  # slots of device memory, and below of host memory
    ddr_rows: int
    hbm_misses: float  # rows asked of host memory
    misses: float  # of the SSD
    device_misses: float  # of the drives, as the system has not their page in memory
    is_full: bool  # every row has a slot in host memory, and stays there
    is_in_memory: bool  # the same, or in device memory
    keeps_two: bool  # the rows of two batches can stay pinned: one is fetched while the other is in use
    pages_read: float  # by the drives, for missing rows
    rows_written: float  # appended as they were evicted
    rows_moved: float  # once more, by cleaning
    segments_cleaned: float  # that the drives have to read
    transactions: float

    @property
    def pages_written(self) -> float:
        size = self.layout.rows_per_segment
        return (self.rows_written + self.rows_moved) / size * self.layout.segment_pages(size)


def pool_loads(setup: Setup, demand: Demand) -> tuple[PoolLoad, ...]:
    """Of each pool, on one host; of a serving setup with workers, in one of them. ValueError: a budget cannot hold the
    fewest rows that a store must have in memory; names what is enough."""
    rows = pool_rows(setup, demand)
    try:
        hot = _hbm_sizes(int(setup.hbm_bytes), rows) if setup.hbm_bytes else {}
        staging = sum(size.host_bytes(layout) for layout, size in hot.items())
        budget = int(setup.ddr_bytes / setup.workers)
        ids = math.ceil(setup.workload.id_bytes / setup.parts)
        division = _division(budget, rows, len(setup.workload.tables), setup.policy, staging, ids)
    except BudgetError as error:
        raise ValueError(str(error)) from None
    stored = sum(-(-count // layout.rows_per_segment) * segment_bytes(layout) for layout, count in rows)
    cached_share = min(1.0, setup.page_cache_bytes / stored)  # of the pages on SSD; pools share it as they have pages
    loads = []
    for pool, (layout, count) in zip(demand.pools, rows, strict=True):
        size, hbm_rows = division.pools[layout], min(hot[layout].cached_rows, count) if hot else 0
        together = rows_a_write(layout, division.transaction_bytes, size.cached_rows)
        loads.append(_load(setup, pool, layout, count, hbm_rows, size, cached_share, together))
    return tuple(loads)


@lru_cache(maxsize=4096)
def _division(budget: int, rows: _Counts, num_tables: int, policy: str, staging: int, ids: int) -> Division:
    return divide(
        budget, dict(rows), num_tables=num_tables, policy=policy, given=budget, hbm_staging=staging, ids_bytes=ids
    )


@lru_cache(maxsize=4096)
def _hbm_sizes(budget: int, rows: _Counts) -> dict[RowLayout, HbmSize]:
    return divide_hbm(budget, dict(rows), given=budget)


def segment_bytes(layout: RowLayout) -> int:
    return layout.segment_pages(layout.rows_per_segment) * layout.page_bytes


def _load(
    setup: Setup, pool: PoolDemand, layout: RowLayout, num_rows: int, hbm_rows: int, size: PoolSize,
    cached_share: float, transaction_rows: int,
) -> PoolLoad:  # fmt: skip
    hosts, is_training, (ddr_rows, _, is_full) = setup.parts, setup.workload.is_training, size
    unique, top = pool.unique / hosts, hbm_rows or ddr_rows

    def missed(rows: float) -> float:
        """Of a batch's distinct rows, those that a cache of so many has not; all hosts' caches together are as one."""
        return unique * pool.curve.miss_ratio(rows * hosts)

    stays = hbm_rows >= num_rows if hbm_rows else is_full
    again = unique if is_training and not stays and unique > top else 0.0
    both = rows_together(hbm_rows, ddr_rows, is_training=is_training)
    num_pages = num_rows / layout.rows_per_block * layout.pages_per_block
    cached_pages = cached_share * num_pages
    misses = 0.0 if is_full or stays else missed(both)
    from_device = min(misses, missed(rows_together(both, cached_pages, is_training=is_training)))
    if hbm_rows:
        hbm_misses = again + (0.0 if stays else missed(hbm_rows))
    else:
        hbm_misses = unique + again
        read_again = max(0.0, again - top)  # backward begins with the rows that are in still
        misses += read_again
        from_device += read_again if cached_pages < unique else 0.0
    written, transactions, live = 0.0, 0.0, 0.0
    if misses and is_training:
        live = _live_in_victims(min(both / num_rows, _MOST_CACHED))
        most = _BY_COUNT.get(resolve_policy(setup.policy))
        if most is not None:
            written = min(misses, unique)
            transactions = written / min(max(misses, min(ddr_rows / MOVED_SHARE, most)), transaction_rows)
        else:
            # The next victims are written together, half a transaction before they leave on average: some change once
            # more meanwhile. A row that is fetched twice has changed once.
            written = min(misses + missed(both - transaction_rows / 2) - missed(both), unique)
            transactions = written / transaction_rows
    # Other rows of a page may have brought it into the page cache.
    others = max(0.0, 1 - layout.pages_per_block / layout.rows_per_block)
    from_device *= 0.0 if cached_share >= 1 else (1 - cached_share) ** others
    # Missing rows lie anywhere: some of them on one page.
    pages = row_pages(layout)
    crowding = from_device * pages / num_pages
    shared = -math.expm1(-crowding) / crowding if crowding else 1.0
    cleaned = written * setup.cleaning
    return PoolLoad(
        layout=layout,
        num_rows=num_rows,
        lookups=pool.lookups / hosts,
        bags=len(pool.tables) * setup.workload.batch_samples / hosts,
        unique=unique,
        sent_rows=unique if hosts == 1 else pool.rows_of(hosts),
        asked=unique + again,
        hbm_rows=hbm_rows,
        ddr_rows=ddr_rows,
        hbm_misses=hbm_misses,
        misses=misses,
        device_misses=from_device,
        is_full=is_full,
        is_in_memory=is_full or stays,
        keeps_two=stays or 2 * unique <= HELD_SHARE * top,
        pages_read=from_device * pages * shared,
        rows_written=written,
        rows_moved=cleaned * live / (1 - live),
        segments_cleaned=cleaned / (1 - live) / layout.rows_per_segment * (1 - cached_share),
        transactions=transactions,
    )


def rows_together(upper: float, lower: float, *, is_training: bool) -> float:
    """Rows of the one cache that hits as often as two, of which the lower is filled with what the upper misses, and
    keeps rows that went up. In training it also takes in what the upper evicts: at most half of that is above."""
    return max(upper + lower / 2, lower) if is_training else max(upper, lower)


@lru_cache(maxsize=256)
def row_pages(layout: RowLayout) -> float:
    """That one row is on, on average over a full segment, as ``io.reads`` reads it."""
    geo, index = geometry(layout, 0), np.arange(layout.rows_per_segment)
    block_words = geo.pages_per_block * geo.page_words
    at = index // geo.rows_per_block * block_words + BLOCK_HEADER_WORDS + index % geo.rows_per_block * geo.pair_stride
    length = 1 if geo.pages_per_block == 1 else geo.row_words + PAIR_WORDS
    return float(np.mean((at + length - 1) // geo.page_words - at // geo.page_words + 1))


@lru_cache(maxsize=4096)
def _live_in_victims(cached: float) -> float:
    """The share u of a segment's rows that are still live when cleaning comes to it, if all rows are used alike and the
    store has cleaned for long; ``cached``: of all rows, whose copies on disk are live until they are evicted.

    With ``s N`` rows in the log of N, ``-ln u / (1 - u) = s``, and u / (1 - u) are moved for each that is appended
    (M. Rosenblum and J. Ousterhout, 1992; P. Desnoyers, Analytic modeling of SSD write performance, SYSTOR 2012). The
    kept version counts too, so rows have the slack of both.
    """
    slack = (2 * DEFAULT_SLACK - 1 - cached) / (1 - cached)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        live = (low + high) / 2
        low, high = (live, high) if -math.log(live) / (1 - live) > slack else (low, live)
    return low
