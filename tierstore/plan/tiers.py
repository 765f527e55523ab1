"""Rows of a budget, and what each tier of a host then has of what it is asked for.

Budgets become rows by the store's own rule (``budget.divide``), index, policy and staging included.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from ..cache import REFERENCE_PREFIX, resolve_policy
from ..errors import BudgetError
from ..hbm.full import FullSize
from ..hbm.pool import HbmSize
from ..io.cleaning import DEFAULT_SLACK
from ..io.places import NARROW, place_type
from ..io.segments import geometry
from ..pool import HELD_SHARE
from ..pool.writeback import rows_a_write
from ..rows import BLOCK_HEADER_WORDS, PAIR_WORDS, RowLayout
from ..store.budget import Division, divide, divide_hbm
from .demand import Demand, PoolDemand
from .prediction import Setup
from .workload import Workload

_BY_COUNT: Final = ("lfu", "tinylfu")
"""Policies whose next victim is mostly a row of the batch before, which is newer than on disk."""
_HALVINGS: Final = 24
_MOST_CACHED: Final = 0.999
_FILE_SHARE: Final = 1.05
"""Of a file of segments, over their bytes: the tree above them, and free pages."""


class PoolLoad(NamedTuple):
    """One pool of one host, or of one worker, in one step or query.

    Attributes:
        layout: of its rows.
        num_rows: that the host has of it, on SSD.
        lookups: ids.
        bags: lists of ids, one a sample and table.
        unique: distinct rows of the ids.
        sent_rows: distinct rows of a host's own part of the batch: those that it asks their owners for, itself among
            them; of one host ``unique``.
        asked: rows asked of the highest tier: ``unique``, twice where backward has to bring them in again.
        hbm_rows, ddr_rows: slots, of device memory and of host memory.
        hbm_misses: rows asked of host memory; ``asked`` where there is no tier above it.
        misses: rows asked of the SSD.
        is_full: every row has a slot in host memory, and stays there.
        is_in_memory: the same, or in device memory.
        keeps_two: the rows of two batches can stay pinned, so that one is brought in while the other is in use.
        device_misses: of ``misses``, those whose page the system has not in memory.
        pages_read: by the device, for missing rows.
        rows_written: appended, as they left.
        rows_moved: by cleaning: appended once more, so that segments can be deleted.
        segments_cleaned: such segments, those that the device has to read.
        transactions: in which rows are appended.
    """

    layout: RowLayout
    num_rows: int
    lookups: float
    bags: float
    unique: float
    sent_rows: float
    asked: float
    hbm_rows: int
    ddr_rows: int
    hbm_misses: float
    misses: float
    device_misses: float
    is_full: bool
    is_in_memory: bool
    keeps_two: bool
    pages_read: float
    rows_written: float
    rows_moved: float
    segments_cleaned: float
    transactions: float

    @property
    def pages_written(self) -> float:
        """Of full segments."""
        size = self.layout.rows_per_segment
        return (self.rows_written + self.rows_moved) / size * self.layout.segment_pages(size)


def pool_loads(setup: Setup, demand: Demand) -> tuple[PoolLoad, ...]:
    """Of each pool, on one host; of a serving setup with workers, in one of them.

    Raises:
        ValueError: a budget cannot hold the fewest rows that a store must have in memory; names what is enough.
    """
    rows = tuple((pool.layout, math.ceil(pool.num_rows / setup.hosts)) for pool in demand.pools)
    hot = _hbm_sizes(int(setup.hbm_bytes), rows, setup.policy) if setup.hbm_bytes else {}
    staging = sum(size.host_bytes(layout) for layout, size in hot.items())
    budget = int(setup.ddr_bytes / setup.workers)
    division = _division(budget, rows, len(setup.workload.tables), setup.policy, staging)
    share = _page_cache_share(setup, rows)
    loads = []
    for pool, (layout, count) in zip(demand.pools, rows, strict=True):
        size = division.pools[layout]
        hbm_rows = hot[layout].cached_rows if hot else 0
        own = _Share(
            pool=pool,
            setup=setup,
            num_rows=count,
            hbm_rows=min(hbm_rows, count),
            ddr_rows=size.cached_rows,
            is_full=size.is_full,
            cached_share=share,
            transaction_bytes=division.transaction_bytes,
        )
        loads.append(_load(own))
    return tuple(loads)


@lru_cache(maxsize=4096)
def _division(
    budget: int, rows: tuple[tuple[RowLayout, int], ...], num_tables: int, policy: str, staging: int
) -> Division:
    try:
        return divide(budget, dict(rows), num_tables=num_tables, policy=policy, given=budget, hbm_staging=staging)
    except BudgetError as error:
        raise ValueError(str(error)) from None


@lru_cache(maxsize=4096)
def _hbm_sizes(
    budget: int, rows: tuple[tuple[RowLayout, int], ...], policy: str
) -> dict[RowLayout, HbmSize | FullSize]:
    try:
        return divide_hbm(budget, dict(rows), policy=policy, given=budget)
    except BudgetError as error:
        raise ValueError(str(error)) from None


def _page_cache_share(setup: Setup, rows: Sequence[tuple[RowLayout, int]]) -> float:
    """Of the pages on SSD, those that the page cache has room for; pools share it in proportion to theirs."""
    stored = sum(-(-count // layout.rows_per_segment) * segment_bytes(layout) for layout, count in rows)
    return min(1.0, setup.page_cache_bytes / stored)


def segment_bytes(layout: RowLayout) -> int:
    """Of a full one."""
    return layout.segment_pages(layout.rows_per_segment) * layout.page_bytes


class StoreFile(NamedTuple):
    """Rows of one layout in a store's file, at its largest.

    Attributes:
        place_bytes: that the map takes for each row of the store's tables.
    """

    rows: int
    segments: int
    place_bytes: int
    bytes: float


def file_of(layout: RowLayout, num_rows: int, workload: Workload) -> StoreFile:
    """Of so many rows.

    In training all rows may be written again between two commits: then both versions are there, with their slack.
    """
    segments = (2 * DEFAULT_SLACK if workload.is_training else 1) * num_rows / layout.rows_per_segment
    width = place_type(geometry(layout, 0), [math.ceil(segments)], NARROW).itemsize
    return StoreFile(num_rows, math.ceil(segments), width, _FILE_SHARE * segments * segment_bytes(layout))


class _Share(NamedTuple):
    """A host's part of a pool."""

    pool: PoolDemand
    setup: Setup
    num_rows: int
    hbm_rows: int
    ddr_rows: int
    is_full: bool
    cached_share: float
    transaction_bytes: int

    @property
    def layout(self) -> RowLayout:
        return self.pool.layout

    @property
    def is_training(self) -> bool:
        return self.setup.workload.is_training

    @property
    def unique(self) -> float:
        return self.pool.unique / self.setup.hosts

    @property
    def num_pages(self) -> float:
        """That rows are on."""
        return self.num_rows / self.layout.rows_per_block * self.layout.pages_per_block

    @property
    def transaction_rows(self) -> int:
        """At most."""
        return rows_a_write(self.layout, self.transaction_bytes, self.ddr_rows)

    def missed(self, rows: float) -> float:
        """Of a batch's distinct rows, those that a cache of so many has not; all hosts' caches together are as one."""
        return self.unique * self.pool.curve.miss_ratio(rows * self.setup.hosts)


def _load(own: _Share) -> PoolLoad:
    unique, top = own.unique, own.hbm_rows or own.ddr_rows
    stays = own.hbm_rows >= own.num_rows if own.hbm_rows else own.is_full
    again = unique if own.is_training and not stays and unique > top else 0.0
    both = rows_together(own.hbm_rows, own.ddr_rows, is_training=own.is_training)
    misses = 0.0 if own.is_full or stays else own.missed(both)
    with_page_cache = rows_together(both, own.cached_share * own.num_pages, is_training=own.is_training)
    from_device = min(misses, own.missed(with_page_cache))
    if own.hbm_rows:
        hbm_misses = again + (0.0 if stays else own.missed(own.hbm_rows))
    else:
        hbm_misses = unique + again
        read_again = max(0.0, again - top)  # backward begins with the rows that are in still
        misses += read_again
        from_device += read_again if own.cached_share * own.num_pages < unique else 0.0
    keeps_two = stays or 2 * unique <= HELD_SHARE * top
    written = _written(own, both, misses) if misses and own.is_training else _Written(0.0, 0.0)
    live = _live(own, both, written) if written.rows else 0.0
    cleaning = _cleaning(own, written.rows)
    elsewhere = 1 - _found_by_chance(own.cached_share, own.layout)
    return PoolLoad(
        layout=own.layout,
        num_rows=own.num_rows,
        lookups=own.pool.lookups / own.setup.hosts,
        bags=len(own.pool.tables) * own.setup.workload.batch_samples / own.setup.hosts,
        unique=unique,
        sent_rows=own.pool.rows_of_a_part(own.setup.hosts),
        asked=unique + again,
        hbm_rows=own.hbm_rows,
        ddr_rows=own.ddr_rows,
        hbm_misses=hbm_misses,
        misses=misses,
        device_misses=from_device * elsewhere,
        is_full=own.is_full,
        is_in_memory=own.is_full or stays,
        keeps_two=keeps_two,
        pages_read=from_device * elsewhere * _pages_a_row(own, from_device),
        rows_written=written.rows,
        rows_moved=written.rows * cleaning * live / (1 - live),
        segments_cleaned=written.rows * cleaning / (1 - live) / own.layout.rows_per_segment * (1 - own.cached_share),
        transactions=written.transactions,
    )


class _Written(NamedTuple):
    """In a step."""

    rows: float
    transactions: float

    @property
    def together(self) -> int:
        """Rows of a transaction, on average; 0: there is none."""
        return max(1, round(self.rows / self.transactions)) if self.transactions else 0


def _written(own: _Share, rows: float, misses: float) -> _Written:
    """Rows that leave, and rows that change once more after they were written: the next victims are written together,
    half a transaction before they leave on average. By count each batch has those of the one before written, and behind
    these are clean ones. A row that is brought in twice has changed once.

    Args:
        rows: that all tiers in memory hold.
    """
    together = own.transaction_rows
    if resolve_policy(own.setup.policy).removeprefix(REFERENCE_PREFIX) in _BY_COUNT:
        return _Written(min(misses, own.unique), max(1.0, misses / together))
    written = min(misses + own.missed(rows - together / 2) - own.missed(rows), own.unique)
    return _Written(written, written / together)


def rows_together(upper: float, lower: float, *, is_training: bool) -> float:
    """Rows of the one cache that hits as often as two, of which the lower is filled with what the upper misses.

    The lower one keeps a row that went up, as far as there is room, so it adds what it has beyond the upper one. In
    training a row that leaves the upper one is put into the lower one again: then at most half of what the lower one
    takes in are rows that are above.
    """
    return max(upper + lower / 2, lower) if is_training else max(upper, lower)


def _found_by_chance(share: float, layout: RowLayout) -> float:
    """The chance that a row's page is in a page cache of this share of all pages because of its other rows."""
    others = max(0.0, 1 - layout.pages_per_block / layout.rows_per_block)
    return 1.0 if share >= 1 else 1 - (1 - share) ** others


@lru_cache(maxsize=256)
def row_pages(layout: RowLayout) -> float:
    """That one row is on, on average over a full segment, as ``io.gather`` reads it."""
    geo, index = geometry(layout, 0), np.arange(layout.rows_per_segment)
    block_words = geo.pages_per_block * geo.page_words
    at = index // geo.rows_per_block * block_words + BLOCK_HEADER_WORDS + index % geo.rows_per_block * geo.pair_stride
    length = 1 if geo.pages_per_block == 1 else geo.row_words + PAIR_WORDS
    return float(np.mean((at + length - 1) // geo.page_words - at // geo.page_words + 1))


def _pages_a_row(own: _Share, read: float) -> float:
    """For each of so many rows that a batch reads from the device, which lie anywhere: some of them on one page."""
    pages = row_pages(own.layout)
    crowding = read * pages / own.num_pages
    shared = -math.expm1(-crowding) / crowding if crowding else 1.0
    return min(pages * shared, pages / own.setup.rows_per_read)


def _live(own: _Share, rows: float, written: _Written) -> float:
    """See ``_live_in_victims``; ``rows``: that all tiers in memory hold."""
    return _live_in_victims(min(rows / own.num_rows, _MOST_CACHED), own.layout, written.together)


def _cleaning(own: _Share, written: float) -> float:
    """How much of its lasting work cleaning does: all after long, nothing while the slack has room for what
    ``Setup.steps`` have superseded, and then ever more.

    Args:
        written: rows, a step.
    """
    if not own.setup.steps or not written:
        return 1.0
    appended, used = own.setup.steps * written, min(own.num_rows, own.pool.curve.num_rows / own.setup.hosts)
    changed = -math.expm1(-appended / used) * used
    allowed = DEFAULT_SLACK * changed + (DEFAULT_SLACK - 1) * own.num_rows
    return -math.expm1(-max(0.0, appended / allowed - 1))


@lru_cache(maxsize=4096)
def _live_in_victims(cached: float, layout: RowLayout, together: int) -> float:
    """The share u of a segment's rows that are still live when cleaning comes to it, if all rows are used alike.

    Of N rows that are overwritten at random a copy is live with the chance ``exp(-a / N)`` after a further ones were
    appended. Segments are cleaned when u of them is left, and what was moved again when u of that is, and so on: with
    ``s N`` rows in the log ``-ln u / (1 - u) = s``, and u / (1 - u) are moved for each that is appended (M. Rosenblum
    and J. Ousterhout, 1992; P. Desnoyers, Analytic modeling of SSD write performance, SYSTOR 2012). Of a row in memory
    the copy on disk is live until it leaves: as long as it takes to append as many rows as are cached. Rows of the kept
    version count, too, so that the newer ones have the slack of both. The slack is of pages, of which segments that are
    not full take more: the last one of the rows that a transaction moves, and of those that it appends if they are not
    whole segments.

    Args:
        cached: of all rows.
        together: rows that a transaction appends.
    """
    slack, full_segment = (2 * DEFAULT_SLACK - 1 - cached) / (1 - cached), layout.segment_pages(layout.rows_per_segment)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        live = (low + high) / 2
        moved = together * live / (1 - live)
        least = (together + moved) / layout.rows_per_segment * full_segment
        taken = layout.pages_for(together) + layout.pages_for(math.ceil(moved))
        low, high = (live, high) if -math.log(live) / (1 - live) > slack * least / taken else (low, live)
    return low
