"""Rows of a budget, and what each tier of a host then has of what it is asked for.

Budgets become rows by the store's own rule (``budget.divide``), index, policy and staging included.
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

from ..budget import Division, divide, divide_hbm
from ..cache import REFERENCE_PREFIX, resolve_policy
from ..errors import BudgetError
from ..hbm.pool import HbmSize, host_bytes_of
from ..pool import HELD_SHARE
from ..rows import RowLayout
from .demand import Demand, PoolDemand
from .prediction import Setup

__all__ = ["PoolLoad", "pool_loads", "rows_together"]

BLOCKS_A_LEAF: Final = 80
"""Of the 120 that a page of 4 KiB has room for: leaves of a tree that changes are two thirds full."""
_LEAST_TRANSACTIONS: Final = 0.5
"""In a step that has rows leave: trained stores with much memory made 0.5 to 0.7."""
_FULL_SHARE: Final = 0.6
"""Of what a transaction may hold: those of stores with little memory held 0.5 to 0.7."""
_STEPS: Final = 50


class PoolLoad(NamedTuple):
    """One pool of one host, or of one worker, in one step or query.

    Attributes:
        layout: of its rows.
        num_rows: that the host has of it, on SSD.
        lookups: ids.
        bags: lists of ids, one a sample and table.
        unique: distinct rows of the ids.
        asked: rows asked of the highest tier: ``unique``, twice where backward has to bring them in again.
        hbm_rows, ddr_rows: slots, of all accelerators and of host memory.
        hbm_misses: rows asked of host memory; ``asked`` where there is no tier above it.
        misses: rows asked of the SSD.
        is_full: every row has a slot in host memory, and stays there.
        keeps_batch: the rows of a batch can stay pinned until its backward, so that they can be brought in ahead.
        device_misses: of ``misses``, those whose block the system has not in memory.
        blocks_read: by the device, for missing rows, and for the rest of blocks that are rewritten.
        blocks_written: rewritten for rows that left.
        leaves_written: pages of the tree above those blocks that are written along.
        transactions: in which blocks are written.
    """

    layout: RowLayout
    num_rows: int
    lookups: float
    bags: float
    unique: float
    asked: float
    hbm_rows: int
    ddr_rows: int
    hbm_misses: float
    misses: float
    device_misses: float
    is_full: bool
    keeps_batch: bool
    blocks_read: float
    blocks_written: float
    leaves_written: float
    transactions: float


def pool_loads(setup: Setup, demand: Demand) -> tuple[PoolLoad, ...]:
    """Of each pool, on one host; of a serving setup with workers, in one of them.

    Raises:
        ValueError: a budget cannot hold the fewest rows that a store must have in memory; names what is enough.
    """
    rows = tuple((pool.layout, math.ceil(pool.num_rows / setup.hosts)) for pool in demand.pools)
    accelerators = len(setup.host.accelerators) if setup.hbm_bytes else 0
    device_rows = tuple((layout, math.ceil(count / max(accelerators, 1))) for layout, count in rows)
    hot = _hbm_sizes(int(setup.hbm_bytes), device_rows, setup.policy) if accelerators else {}
    staging = accelerators * sum(host_bytes_of(layout, size) for layout, size in hot.items())
    budget = int(setup.ddr_bytes / setup.workers)
    division = _division(budget, rows, len(setup.workload.tables), setup.policy, staging)
    blocks = _blocks_in_page_cache(setup, demand)
    loads = []
    for pool, (layout, count), cached_blocks in zip(demand.pools, rows, blocks, strict=True):
        size = division.pools[layout]
        hbm_rows = accelerators * hot[layout].cached_rows if accelerators else 0
        own = _Share(
            pool=pool,
            setup=setup,
            num_rows=count,
            hbm_rows=min(hbm_rows, count),
            ddr_rows=size.cached_rows,
            is_full=size.is_full,
            cached_blocks=cached_blocks,
            transaction_blocks=division.transaction_bytes // layout.block_bytes,
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
def _hbm_sizes(budget: int, rows: tuple[tuple[RowLayout, int], ...], policy: str) -> dict[RowLayout, HbmSize]:
    try:
        return divide_hbm(budget, dict(rows), policy=policy, given=budget)
    except BudgetError as error:
        raise ValueError(str(error)) from None


def _blocks_in_page_cache(setup: Setup, demand: Demand) -> list[float]:
    """Of each pool; pools share the page cache in proportion to their blocks on SSD."""
    counts = [pool.layout.num_blocks(math.ceil(pool.num_rows / setup.hosts)) for pool in demand.pools]
    sizes = [
        count * pool.layout.pages_per_block * pool.layout.page_bytes
        for pool, count in zip(demand.pools, counts, strict=True)
    ]
    share = min(1.0, setup.page_cache_bytes / sum(sizes))
    return [share * count for count in counts]


class _Share(NamedTuple):
    """A host's part of a pool."""

    pool: PoolDemand
    setup: Setup
    num_rows: int
    hbm_rows: int
    ddr_rows: int
    is_full: bool
    cached_blocks: float
    transaction_blocks: float

    @property
    def is_training(self) -> bool:
        return self.setup.workload.is_training

    @property
    def unique(self) -> float:
        return self.pool.unique / self.setup.hosts

    @property
    def num_blocks(self) -> int:
        return self.pool.layout.num_blocks(self.num_rows)

    def missed(self, rows: float) -> float:
        """Of a batch's distinct rows, those that a cache of so many has not; all hosts' caches together are as one."""
        return self.unique * self.pool.curve.miss_ratio(rows * self.setup.hosts)


def _load(own: _Share) -> PoolLoad:
    unique, top = own.unique, own.hbm_rows or own.ddr_rows
    stays = own.hbm_rows >= own.num_rows if own.hbm_rows else own.is_full
    again = unique if own.is_training and not stays and unique > top else 0.0
    both = rows_together(own.hbm_rows, own.ddr_rows, is_training=own.is_training)
    misses = 0.0 if own.is_full or stays else own.missed(both)
    from_device = min(misses, own.missed(rows_together(both, own.cached_blocks, is_training=own.is_training)))
    if own.hbm_rows:
        hbm_misses = again + (0.0 if stays else own.missed(own.hbm_rows))
    else:
        hbm_misses = unique + again
        misses += again
        from_device += again if own.cached_blocks < unique else 0.0
    elsewhere = 1 - _found_by_chance(own.cached_blocks / own.num_blocks, own.pool.layout.rows_per_block)
    written = _written(own, min(misses, unique))  # a row that is brought in twice has changed once
    return PoolLoad(
        layout=own.pool.layout,
        num_rows=own.num_rows,
        lookups=own.pool.lookups / own.setup.hosts,
        bags=len(own.pool.tables) * own.setup.workload.batch_samples / own.setup.hosts,
        unique=unique,
        asked=unique + again,
        hbm_rows=own.hbm_rows,
        ddr_rows=own.ddr_rows,
        hbm_misses=hbm_misses,
        misses=misses,
        device_misses=from_device * elsewhere,
        is_full=own.is_full,
        keeps_batch=stays or unique <= HELD_SHARE * top,
        blocks_read=(_blocks(from_device, own) + written) * elsewhere,
        blocks_written=written,
        leaves_written=_leaves(own, written),
        transactions=_transactions(own, written) if written else 0.0,
    )


def _leaves(own: _Share, blocks: float) -> float:
    """Each transaction writes the leaves above its blocks once; its blocks lie anywhere, by chance."""
    leaves = math.ceil(own.num_blocks / BLOCKS_A_LEAF)
    together = max(1, own.transaction_blocks)
    return blocks / together * -leaves * math.expm1(-together / leaves)


def _transactions(own: _Share, written: float) -> float:
    """Less than full ones, as rows are written ahead too, fewer at once; and where few rows leave, few at a time."""
    return max(_LEAST_TRANSACTIONS, written / (_FULL_SHARE * max(1, own.transaction_blocks)))


def rows_together(upper: float, lower: float, *, is_training: bool) -> float:
    """Rows of the one cache that hits as often as two, of which the lower is filled with what the upper misses.

    The lower one keeps a row that went up, as far as there is room, so it adds what it has beyond the upper one. In
    training a row that leaves the upper one is put into the lower one again: then at most half of what the lower one
    takes in are rows that are above.
    """
    return max(upper + lower / 2, lower) if is_training else max(upper, lower)


def _found_by_chance(share: float, rows_per_block: int) -> float:
    """The chance that a row's block is in a page cache of this share of all blocks because of its other rows."""
    return 1.0 if share >= 1 else 1 - (1 - share) ** ((rows_per_block - 1) / rows_per_block)


def _blocks(rows: float, own: _Share) -> float:
    """Distinct blocks that so many rows lie in, by chance, or as a packed store has them, whichever are fewer."""
    count = own.num_blocks
    touched = -count * math.expm1(rows * math.log1p(-1 / count)) if count > 1 else 1.0
    return min(rows / max(own.setup.rows_per_read, own.pool.rows_a_block), touched)


def _written(own: _Share, misses: float) -> float:
    """Blocks rewritten in a step for rows that leave.

    LRU's victims leave in the order in which they are written, and with what was written along; of other policies that
    is not taken for granted. TinyLFU's may be used again first, and rows that came in later leave before them: so each
    step a whole transaction is written at least, if so many rows changed.
    """
    if not misses or not own.is_training:
        return 0.0
    policy = resolve_policy(own.setup.policy).removeprefix(REFERENCE_PREFIX)
    if policy == "tinylfu":
        return min(max(misses, own.transaction_blocks), own.unique)
    if policy == "lru" and own.pool.rewrites is not None:
        known = own.pool.rewrites.share(own.ddr_rows * own.setup.hosts, own.pool.layout.rows_per_block)
        if known is not None:
            return known * misses
    share = _written_share(own.ddr_rows / own.num_blocks) if policy == "lru" else 1.0
    return min(share * misses, _blocks(misses, own))


def _written_share(neighbours: float) -> float:
    """Blocks written for each row that leaves, by chance: x in ``x = exp(-x * neighbours)``.

    A block that is written takes along all of its newer rows, which need not be written when they leave. While a row is
    cached as many rows leave as there are cached, its neighbours among them; so its block is written x * neighbours
    times.

    Args:
        neighbours: other cached rows in its block.
    """
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle < math.exp(-middle * neighbours):
            low = middle
        else:
            high = middle
    return high
