"""Divides a budget of host memory among the pools, and within a pool between cache and outbox."""

import bisect
import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from ..cache import ddr
from ..cache.full import TABLE_BYTES, full_size_bytes
from ..errors import BudgetError
from ..hbm.cache import CAPACITY_MAX, INDEX_BYTES, OVERFLOW_INDEX_BYTES, SUMMARY_BYTES, HbmSize
from ..hbm.full import DIRTY_BYTES
from ..hbm.kernel_types import WAYS
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
    if is_share_of_tables(given):  # of small tables it is less than a store needs, and means as little as it takes
        budget = max(budget, _enough(sum(least.values()), hbm_staging + ids_bytes))
    transaction = min(max(int(budget * TRANSACTION_SHARE), MIN_TRANSACTION_BYTES), MAX_TRANSACTION_BYTES)
    available = budget - hbm_staging - ids_bytes - STAGING_BYTES - transaction
    most = {layout: _pool_bytes(layout, count, policy) for layout, count in rows.items()}
    full = {layout: _full_bytes(layout, count, num_tables) for layout, count in rows.items()}
    if available < sum(least.values()):
        raise _too_little(budget, sum(least.values()), hbm_staging, ids_bytes, given)
    shares = full if available >= sum(full.values()) else _shares(available, least, most)
    pools = {
        layout: PoolSize(count, _outbox_rows(count), is_full=True)
        if shares[layout] >= full[layout]
        else _pool_size(layout, count, shares[layout], policy)
        for layout, count in rows.items()
    }
    return Division(transaction, pools)


def divide_hbm(budget: int, rows: Mapping[RowLayout, int], *, given: object) -> dict[RowLayout, HbmSize]:
    """The same of device memory; arguments and errors as of ``divide``."""
    full = {
        layout: full_hbm_bytes_of(layout, count) if count <= CAPACITY_MAX else _NEVER_BYTES
        for layout, count in rows.items()
    }
    if budget >= sum(full.values()):
        return {layout: _full_hbm_size(layout, count) for layout, count in rows.items()}
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
    sizes: dict[RowLayout, HbmSize] = {}
    for layout, share in _shares(budget, least, most).items():
        if share >= full[layout]:
            sizes[layout] = _full_hbm_size(layout, rows[layout])
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


def _full_hbm_size(layout: RowLayout, count: int) -> HbmSize:
    return HbmSize(count, 0, _staging_rows(layout, count))


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
    return ddr.size_bytes_of(policy, count, **_words(layout)) + outbox_bytes(layout, _outbox_rows(count))


def _full_bytes(layout: RowLayout, count: int, num_tables: int) -> int:
    """What a pool takes in which every row has a slot of its own."""
    outbox = outbox_bytes(layout, _outbox_rows(count))
    return full_size_bytes(count, **_words(layout)) + num_tables * TABLE_BYTES + outbox


def _words(layout: RowLayout) -> dict[str, int]:
    return {"weight_words": layout.weight_words, "state_words": layout.state_words}


def _pool_size(layout: RowLayout, count: int, share: int, policy: str) -> PoolSize:
    """What fits into ``share`` bytes, of ``count`` rows."""
    rows = bisect.bisect_right(range(1, count + 1), share, key=lambda rows: _pool_bytes(layout, rows, policy))
    outbox_rows = max(MIN_OUTBOX_ROWS, int(rows * OUTBOX_SHARE))
    fitting = ddr.capacity_for(policy, share - outbox_bytes(layout, outbox_rows), **_words(layout))
    return PoolSize(min(fitting, count), outbox_rows, is_full=False)


def _enough(least: int, others: int) -> int:
    """The smallest budget for pools that take so much, in whole KiB."""
    fixed = least + STAGING_BYTES + others
    whole = max(fixed + MIN_TRANSACTION_BYTES, fixed / (1 - TRANSACTION_SHARE))
    return 1024 * (math.ceil(whole / 1024) + 1)


def _too_little(budget: int, least: int, hbm_staging: int, ids_bytes: int, given: object) -> BudgetError:
    others = "write staging"
    others += f", {format_size(hbm_staging)} to move rows to hbm" * bool(hbm_staging)
    others += f", {format_size(ids_bytes)} for dynamic ids" * bool(ids_bytes)
    return BudgetError(
        f"ddr={given!r} is {format_size(budget)}: too little for {MIN_CACHED_ROWS} rows of each row layout "
        f"({format_size(least)}) alongside {others}; give at least {_enough(least, hbm_staging + ids_bytes) // 1024}KiB"
    )
