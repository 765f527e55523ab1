"""Divides a budget of host memory among the pools, and within a pool between cache and outbox."""

import bisect
import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from .. import cache
from ..errors import BudgetError
from ..hbm.cache import CAPACITY_MAX, INDEX_BYTES, SUMMARY_BYTES
from ..hbm.cache_state import WAYS
from ..hbm.full import DIRTY_BYTES, FullSize
from ..hbm.overflow import OVERFLOW_INDEX_BYTES
from ..hbm.pool import HbmSize
from ..layout import RowLayout
from ..pool.writeback import MIN_OUTBOX_ROWS, outbox_bytes
from ..system.sizes import format_size, is_share_of_tables

MIN_CACHED_ROWS: Final = 64  # fewest rows a layout's cache must hold (all its rows, if there are fewer)
STAGING_BYTES: Final = 256 * 2**10  # a segment under construction
TRANSACTION_SHARE: Final = 1 / 8
MIN_TRANSACTION_BYTES: Final = 128 * 2**10
MAX_TRANSACTION_BYTES: Final = 2**20
"""Pages that LMDB keeps until a write-back transaction ends: a share of the budget, within bounds. Larger ones cost as
much a row, and write more rows that are used once more before they leave."""
OUTBOX_SHARE: Final = 1 / 16  # rows in a pool's outbox, of the rows in its cache
OVERFLOW_SHARE: Final = 1 / 16
"""Overflow slots of a pool in device memory, of its cached rows: for rows all of whose set is in use."""
MIN_OVERFLOW_ROWS: Final = 64
_MOST_SLOTS: Final = int((CAPACITY_MAX - MIN_OVERFLOW_ROWS) / (1 + OVERFLOW_SHARE))
_NEVER_BYTES: Final = 2**62  # of a tier whose slots int32 cannot number
HBM_STAGING_SHARE: Final = 1 / 32
MIN_STAGING_ROWS: Final = 16
MAX_STAGING_BYTES: Final = 8 * 2**20  # of each buffer that rows are moved through; below, a share of the cached rows


class PoolSize(NamedTuple):
    cached_rows: int
    outbox_rows: int
    is_full: bool  # every row has a slot of its own (``cache.FullCache``)


class Division(NamedTuple):
    transaction_bytes: int
    pools: dict[RowLayout, PoolSize]

    @property
    def reserved_bytes(self) -> int:
        """Bytes outside the pools."""
        return STAGING_BYTES + self.transaction_bytes


def divide(
    budget: int, rows: Mapping[RowLayout, int], *, num_tables: int, policy: str, given: object, hbm_staging: int = 0,
    ids_bytes: int = 0,
) -> Division:  # fmt: skip
    """Give each layout its minimum of rows, and a share of the rest in proportion to its full size.

    Args:
        rows: of all tables of a layout together.
        given: the budget as its owner wrote it, for the BudgetError that names what is enough.
        hbm_staging: bytes of the budget that the tier above needs; ids_bytes: those that dynamic ids take.
    """
    least = {layout: _pool_bytes(layout, min(count, MIN_CACHED_ROWS), policy) for layout, count in rows.items()}
    fewest, others = sum(least.values()), hbm_staging + ids_bytes
    if is_share_of_tables(given):  # of small tables it is less than a store needs, and means as little as it takes
        budget = max(budget, _enough(fewest, others))
    transaction = min(max(int(budget * TRANSACTION_SHARE), MIN_TRANSACTION_BYTES), MAX_TRANSACTION_BYTES)
    available = budget - others - STAGING_BYTES - transaction
    if available < fewest:
        named = f", {format_size(hbm_staging)} to move rows to hbm" * bool(hbm_staging)
        named += f", {format_size(ids_bytes)} for dynamic ids" * bool(ids_bytes)
        raise BudgetError(
            f"ddr={given!r} is {format_size(budget)}: too little for {MIN_CACHED_ROWS} rows of each row layout "
            f"({format_size(fewest)}) alongside write staging{named}; give at least "
            f"{_enough(fewest, others) // 1024}KiB"
        )
    most = {layout: _pool_bytes(layout, count, policy) for layout, count in rows.items()}
    full = {
        layout: cache.full_size_bytes(count, **_words(layout))
        + num_tables * cache.TABLE_BYTES
        + outbox_bytes(layout, _outbox_rows(count))
        for layout, count in rows.items()
    }
    shares, pools = full if available >= sum(full.values()) else _shares(available, least, most), {}
    for layout, count in rows.items():
        share = shares[layout]
        if share >= full[layout]:
            pools[layout] = PoolSize(count, _outbox_rows(count), is_full=True)
            continue
        fitting = bisect.bisect_right(
            range(1, count + 1),
            share,
            key=lambda cached, own=layout: _pool_bytes(own, cached, policy),  # type: ignore[misc]
        )
        outbox_rows = max(MIN_OUTBOX_ROWS, int(fitting * OUTBOX_SHARE))
        cached = cache.capacity_for(policy, share - outbox_bytes(layout, outbox_rows), **_words(layout))
        pools[layout] = PoolSize(min(cached, count), outbox_rows, is_full=False)
    return Division(transaction, pools)


def divide_hbm(budget: int, rows: Mapping[RowLayout, int], *, given: object) -> dict[RowLayout, HbmSize | FullSize]:
    """The same of device memory; arguments and errors as of ``divide``."""
    full = {
        layout: full_hbm_bytes_of(layout, count) if count <= CAPACITY_MAX else _NEVER_BYTES
        for layout, count in rows.items()
    }
    if budget >= sum(full.values()):
        return {layout: FullSize(count, _staging_rows(layout, count)) for layout, count in rows.items()}
    wanted = {layout: min(count, _MOST_SLOTS) for layout, count in rows.items()}
    fewest = {layout: min(MIN_CACHED_ROWS, count) for layout, count in wanted.items()}
    least = {layout: hbm_bytes_of(layout, count) for layout, count in fewest.items()}
    most = {layout: hbm_bytes_of(layout, count) for layout, count in wanted.items()}
    if is_share_of_tables(given):
        budget = max(budget, sum(least.values()))
    if budget < sum(least.values()):
        raise BudgetError(
            f"hbm={given!r} is {format_size(budget)}: too little for {MIN_CACHED_ROWS} rows of each row layout; "
            f"give at least {math.ceil(min(sum(least.values()), sum(full.values())) / 1024)}KiB"
        )
    sizes: dict[RowLayout, HbmSize | FullSize] = {}
    for layout, share in _shares(budget, least, most).items():
        if share >= full[layout]:
            sizes[layout] = FullSize(rows[layout], _staging_rows(layout, rows[layout]))
            continue
        places = range(fewest[layout], wanted[layout] + 1)
        fitting = bisect.bisect_right(places, share, key=lambda count, own=layout: hbm_bytes_of(own, count))  # type: ignore[misc]
        sizes[layout] = _hbm_size(layout, places[max(fitting, 1) - 1])
    return sizes


def _shares(budget: int, least: Mapping[RowLayout, int], most: Mapping[RowLayout, int]) -> dict[RowLayout, int]:
    """Bytes of each layout."""
    part = min(1.0, (budget - sum(least.values())) / max(1, sum(most.values()) - sum(least.values())))
    return {layout: fewest + int(part * (most[layout] - fewest)) for layout, fewest in least.items()}


def _staging_rows(layout: RowLayout, cached: int) -> int:
    return max(MIN_STAGING_ROWS, min(int(cached * HBM_STAGING_SHARE), MAX_STAGING_BYTES // layout.row_bytes))


def _hbm_size(layout: RowLayout, cached: int) -> HbmSize:
    return HbmSize(cached, MIN_OVERFLOW_ROWS + int(cached * OVERFLOW_SHARE), _staging_rows(layout, cached))


def full_hbm_bytes_of(layout: RowLayout, count: int) -> int:
    """Device memory of a pool that has all of its rows there; what ``FullRows.size_bytes`` says."""
    return count * (layout.row_bytes + DIRTY_BYTES)


def hbm_bytes_of(layout: RowLayout, cached: int) -> int:
    """Device memory of a pool with so many cached rows; what ``HbmPool.size_bytes`` says."""
    size = _hbm_size(layout, cached)
    index = -(-cached // WAYS) * WAYS * INDEX_BYTES + size.overflow_rows * OVERFLOW_INDEX_BYTES + SUMMARY_BYTES
    return (cached + size.overflow_rows) * layout.row_bytes + index


def _outbox_rows(cached: int) -> int:
    return max(MIN_OUTBOX_ROWS, math.ceil(cached * OUTBOX_SHARE))


def _pool_bytes(layout: RowLayout, count: int, policy: str) -> int:
    """What a pool with so many rows in its cache takes."""
    return cache.size_bytes_of(policy, count, **_words(layout)) + outbox_bytes(layout, _outbox_rows(count))


def _words(layout: RowLayout) -> dict[str, int]:
    return {"weight_words": layout.weight_words, "state_words": layout.state_words}


def _enough(least: int, others: int) -> int:
    """The smallest budget for pools that take so much, in whole KiB."""
    fixed = least + STAGING_BYTES + others
    whole = max(fixed + MIN_TRANSACTION_BYTES, fixed / (1 - TRANSACTION_SHARE))
    return 1024 * (math.ceil(whole / 1024) + 1)
