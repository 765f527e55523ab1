"""The pools of a store: budgets of memory divided among row layouts, for each a cache, and the device tier above."""

import bisect
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ..cache import ddr
from ..cache.base import RowCache
from ..cache.ddr import DdrCache
from ..cache.full import TABLE_BYTES, FullCache, full_size_bytes
from ..errors import BudgetError, TableError
from ..hbm.base import IN_USE
from ..hbm.cache import CAPACITY_MAX, INDEX_BYTES, OVERFLOW_INDEX_BYTES, SUMMARY_BYTES, HbmSize
from ..hbm.full import DIRTY_BYTES
from ..hbm.kernel_types import WAYS
from ..hbm.pool import add_hbm, hbm_stats
from ..io.base import ColdTier
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..pool.pool import Pool
from ..pool.stats import IdStats, Stats, TierStats, of_counters
from ..pool.writeback import MIN_OUTBOX_ROWS, outbox_bytes
from ..system.signals import Flag
from ..system.sizes import (
    device_memory_bytes,
    file_memory_bytes,
    format_size,
    is_share_of_tables,
    parse_size,
    require_memory,
)  # fmt: skip
from .catalog import Catalog
from .stored_ids import ids_bytes

_MANY_BYTES: Final = 2**62  # a percentage of it is no byte if it is zero; more than a device has
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
HBM_STAGING_SHARE: Final = 1 / 32
MIN_STAGING_ROWS: Final = 16
MAX_STAGING_BYTES: Final = 8 * 2**20  # of each buffer that rows are moved through; below, a share of the cached rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """See ``open_store``."""

    ddr: int | str
    hbm: int | str
    device: torch.device
    policy: str

    @property
    def has_hbm(self) -> bool:
        return self.device.type != "cpu" or parse_size(self.hbm, name="hbm", table_bytes=_MANY_BYTES) > 0


class Pools:
    """One pool for each row layout, made at first use. ``lock`` is held while pools are made, closed or frozen, and
    while tables come or go. ``reserved_bytes`` of the memory budget are no pool's."""

    def __init__(self, memory: Memory, cold: ColdTier, workers: Workers, catalog: Catalog, *, readonly: bool) -> None:
        self.lock = threading.RLock()
        self.reserved_bytes = 0
        self._memory = memory
        self._cold = cold
        self._workers = workers
        self._catalog = catalog
        self._readonly = readonly
        self._by_layout: dict[RowLayout, Pool] = {}
        self._before: dict[RowLayout, FullCache] = {}  # of retired pools: the next take their rows over

    def __iter__(self) -> Iterator[Pool]:
        return iter(list(self._by_layout.values()))

    def of(self, layout: RowLayout) -> Pool:
        """BudgetError: a budget is too small, or larger than what the machine has free."""
        with self.lock:
            if not self._by_layout:
                before, self._before = self._before, {}
                self._by_layout = self._build(before)
            return self._by_layout[layout]

    def look(self) -> None:
        """ValueError for wrong ids on a device that no call has raised yet. Waits for it."""
        for pool in self:
            pool.tier.look()

    def require_unused(self, action: str) -> None:
        """TableError if rows are in use: do ``action`` before. Others as of ``look``."""
        self.look()
        if not all(pool.becomes_unused() for pool in self) or any(ids.in_use for ids in self._catalog.ids):
            raise TableError(f"rows are in use by {IN_USE}; {action} before it")

    def freeze(self, wanted: Flag) -> Sequence[Pool]:
        """Freeze the dirty rows of all pools at one moment. Returns them; pools made later are of the next epoch."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lock)
            pools = list(self)
            for pool in pools:
                pool.tier.flush()
            for pool in pools:
                stack.enter_context(pool.writeback.gate)
            for pool in pools:
                stack.enter_context(pool.arena.lock)
            self._catalog.epoch += 1  # first: what is frozen is of a version before, even if this goes no further
            for pool in pools:
                pool.writeback.freeze(self._catalog.epoch, wanted)
        return pools

    def retire(self, *, keep_rows: bool = False) -> None:
        """Write dirty rows back and forget the caches; the next use makes new ones, by ``keep_rows`` with the rows that
        each have a slot of their own. TableError if rows are in use."""
        with self.lock:
            self.look()
            caches = {pool.layout: pool.cache for pool in self if isinstance(pool.cache, FullCache)}
            kept = caches if self._by_layout else self._before
            try:
                while not self._refuse_if_clean():  # another thread may have written a row since they were flushed
                    self.require_unused("create and change tables, or move rows,")
                    for pool in self:
                        pool.flush()
            finally:
                if any(pool.arena.is_closed for pool in self):
                    self.close()
            self._before = kept if keep_rows else {}

    def _refuse_if_clean(self) -> bool:
        with contextlib.ExitStack() as stack:
            for lock in (*(pool.tier.lock for pool in self), *(pool.arena.lock for pool in self)):
                stack.enter_context(lock)
            if any(pool.in_use or not pool.is_clean for pool in self):
                return False
            try:
                for pool in self:
                    pool.refuse()
            except BaseException:
                for pool in self:  # all of them, as another thread may write to one that does not
                    pool.refuse()
                raise
            return True

    def close(self) -> None:
        before, self._by_layout, self._before = self._by_layout, {}, {}
        for pool in before.values():
            pool.close()

    def _build(self, before: dict[RowLayout, FullCache]) -> dict[RowLayout, Pool]:
        memory, tables, rows = self._memory, list(self._catalog.tables.values()), Counter[RowLayout]()
        for table in tables:
            rows[table.layout] += len(table.rows)
        table_bytes = sum(table.size_bytes for table in tables)
        hbm_sizes = {}
        if memory.has_hbm:
            free_bytes = device_memory_bytes(memory.device)
            budget = parse_size(memory.hbm, name="hbm", table_bytes=table_bytes, memory_bytes=free_bytes)
            if memory.device.type == "cpu":
                require_memory(budget, f"hbm={memory.hbm!r}")
            hbm_sizes = divide_hbm(budget, rows, given=memory.hbm)
        budget = parse_size(memory.ddr, name="ddr", table_bytes=table_bytes)
        division = divide(
            budget, rows, num_tables=len(tables), policy=memory.policy, given=memory.ddr, ids_bytes=self._ids_bytes,
            hbm_staging=sum(size.host_bytes(layout) for layout, size in hbm_sizes.items()),
        )  # fmt: skip
        cache: RowCache
        spare = budget - sum(each.size_bytes for each in before.values())
        read, pools = self._catalog.source(self._cold.read), {}
        for layout, size in division.pools.items():
            words = _words(layout)
            if size.is_full:
                cache = FullCache({table.index: table.rows for table in tables if table.layout == layout}, **words)
                if (known := before.get(layout)) is not None:
                    cache.take_over(known, may_copy=2 * cache.size_bytes <= spare)
            else:
                cache = DdrCache(size.cached_rows, policy=memory.policy, **words)
            pools[layout] = Pool(
                layout, cache, self._cold, self._workers,
                transaction_bytes=division.transaction_bytes, outbox_rows=size.outbox_rows, epoch=self._catalog.epoch,
                readonly=self._readonly, read=read,
            )  # fmt: skip
        for table in tables:
            pools[table.layout].leases.add_table(table.index, table.config)
        if hbm_sizes:
            add_hbm(
                pools.values(), hbm_sizes, tables, device=memory.device, policy=memory.policy, readonly=self._readonly,
                given=memory.hbm,
            )  # fmt: skip
        # Memory is taken as rows come in; better an error here than the end of the process then.
        taken = division.reserved_bytes + self._ids_bytes + sum(pool.size_bytes for pool in pools.values())
        require_memory(taken, f"ddr={memory.ddr!r}")
        self.reserved_bytes = division.reserved_bytes
        return pools

    @property
    def _ids_bytes(self) -> int:
        return sum(ids_bytes(table.config) for table in list(self._catalog.tables.values()))

    def stats(self) -> Stats:
        pools, cold, counters = list(self), self._cold, self._cold.counters()
        ids = IdStats(*map(sum, zip(*(each.stats() for each in self._catalog.ids), strict=True)))
        ddr = of_counters([pool.leases.counters() for pool in pools])._replace(
            capacity_rows=sum(pool.cache.capacity for pool in pools),
            bytes=sum(pool.size_bytes for pool in pools) + (self.reserved_bytes + self._ids_bytes if pools else 0),
            seconds=sum(pool.leases.seconds for pool in pools),
            split_batches=sum(pool.leases.split_batches for pool in pools),
            waited_seconds=sum(pool.writeback.waited_seconds for pool in pools),
        )
        ssd = TierStats(
            lookups=counters.rows_read, unique=counters.rows_read, misses=counters.rows_absent,
            hits=counters.rows_read - counters.rows_absent, bytes_read=counters.pages_read * cold.page_bytes,
            capacity_rows=sum(len(table.rows) for table in list(self._catalog.tables.values())),
            bytes=cold.map_bytes, held_bytes=cold.held_bytes, page_cache_bytes=file_memory_bytes(),
            seconds=counters.read_seconds + counters.write_seconds,
            bytes_written=counters.bytes_written, rows_written=counters.rows_written,
            bytes_moved=counters.bytes_moved, rows_moved=counters.rows_moved, pages_moved=counters.pages_moved,
        )  # fmt: skip
        return Stats(hbm_stats(pools), ddr, ssd, ids)


class PoolSize(NamedTuple):
    cached_rows: int
    outbox_rows: int
    is_full: bool  # every row has a slot of its own (``cache.FullCache``)


class Division(NamedTuple):
    transaction_bytes: int
    pools: dict[RowLayout, PoolSize]

    @property
    def reserved_bytes(self) -> int:
        return STAGING_BYTES + self.transaction_bytes


def divide(
    budget: int, rows: Mapping[RowLayout, int], *, num_tables: int, policy: str, given: object, hbm_staging: int = 0,
    ids_bytes: int = 0,
) -> Division:  # fmt: skip
    """Give each layout its minimum of rows, and a share of the rest in proportion to its full size. ``given``: the
    budget as its owner wrote it. ``hbm_staging``, ``ids_bytes``: bytes of it that others need. BudgetError."""

    def size_of(layout: RowLayout, count: int) -> int:
        outbox = max(MIN_OUTBOX_ROWS, math.ceil(count * OUTBOX_SHARE))
        return ddr.size_bytes_of(policy, count, **_words(layout)) + outbox_bytes(layout, outbox)

    fewest, others = _least(rows, size_of), hbm_staging + ids_bytes
    fixed = fewest + STAGING_BYTES + others
    enough = max(fixed + MIN_TRANSACTION_BYTES, fixed / (1 - TRANSACTION_SHARE))
    enough = 1024 * (math.ceil(math.ceil(enough) / 1024) + 1)
    if is_share_of_tables(given):  # of small tables it is less than a store needs, and means as little as it takes
        budget = max(budget, enough)
    transaction = min(max(int(budget * TRANSACTION_SHARE), MIN_TRANSACTION_BYTES), MAX_TRANSACTION_BYTES)
    available = budget - others - STAGING_BYTES - transaction
    if available < fewest:
        named = f", {format_size(hbm_staging)} to move rows to hbm" * bool(hbm_staging)
        named += f", {format_size(ids_bytes)} for dynamic ids" * bool(ids_bytes)
        raise BudgetError(
            f"ddr={given!r} is {format_size(budget)}: too little for {MIN_CACHED_ROWS} rows of each row layout "
            f"({format_size(fewest)}) alongside write staging{named}; give at least {enough // 1024}KiB"
        )
    pools, full = {}, {}
    for layout, count in rows.items():
        pools[layout] = PoolSize(count, max(MIN_OUTBOX_ROWS, math.ceil(count * OUTBOX_SHARE)), is_full=True)
        full[layout] = full_size_bytes(count, **_words(layout)) + num_tables * TABLE_BYTES
        full[layout] += outbox_bytes(layout, pools[layout].outbox_rows)
    for layout, share in _shares(available, rows, size_of, full).items():
        if share >= full[layout]:
            continue
        outbox_rows = max(MIN_OUTBOX_ROWS, int(_fitting(share, layout, rows[layout], size_of) * OUTBOX_SHARE))
        cached = ddr.capacity_for(policy, share - outbox_bytes(layout, outbox_rows), **_words(layout))
        pools[layout] = PoolSize(min(cached, rows[layout]), outbox_rows, is_full=False)
    return Division(transaction, pools)


def divide_hbm(budget: int, rows: Mapping[RowLayout, int], *, given: object) -> dict[RowLayout, HbmSize]:
    """The same of device memory; arguments and errors as of ``divide``."""
    full = {  # what ``FullRows.size_bytes`` says; slots have numbers of int32
        layout: count * (layout.row_bytes + DIRTY_BYTES) if count <= CAPACITY_MAX else _MANY_BYTES
        for layout, count in rows.items()
    }
    wanted = {layout: min(count, _MOST_SLOTS) for layout, count in rows.items()}
    fewest, every = _least(wanted, hbm_bytes_of), sum(full.values())
    if is_share_of_tables(given):
        budget = max(budget, fewest)
    if budget < min(fewest, every):
        raise BudgetError(
            f"hbm={given!r} is {format_size(budget)}: too little for {MIN_CACHED_ROWS} rows of each row layout; "
            f"give at least {math.ceil(min(fewest, every) / 1024)}KiB"
        )
    sizes: dict[RowLayout, HbmSize] = {}
    for layout, share in _shares(budget, wanted, hbm_bytes_of, full).items():
        if share >= full[layout]:
            sizes[layout] = _hbm_size(layout, rows[layout])._replace(overflow_rows=0)
        else:
            fitting = _fitting(share, layout, wanted[layout], hbm_bytes_of)
            sizes[layout] = _hbm_size(layout, max(fitting, min(MIN_CACHED_ROWS, wanted[layout])))
    return sizes


_SizeOf = Callable[[RowLayout, int], int]  # bytes of a pool with so many rows in its cache


def _least(rows: Mapping[RowLayout, int], size_of: _SizeOf) -> int:
    return sum(size_of(layout, min(count, MIN_CACHED_ROWS)) for layout, count in rows.items())


def _shares(
    budget: int, rows: Mapping[RowLayout, int], size_of: _SizeOf, full: dict[RowLayout, int]
) -> dict[RowLayout, int]:
    """Bytes of each layout; ``full`` are those of pools that need no cache."""
    if budget >= sum(full.values()):
        return full
    least = {layout: size_of(layout, min(count, MIN_CACHED_ROWS)) for layout, count in rows.items()}
    more = {layout: size_of(layout, count) - least[layout] for layout, count in rows.items()}
    part = min(1.0, (budget - sum(least.values())) / max(1, sum(more.values())))
    return {layout: fewest + int(part * more[layout]) for layout, fewest in least.items()}


def _fitting(share: int, layout: RowLayout, most: int, size_of: _SizeOf) -> int:
    return bisect.bisect_right(range(1, most + 1), share, key=lambda count: size_of(layout, count))


def _hbm_size(layout: RowLayout, cached: int) -> HbmSize:
    staging = max(MIN_STAGING_ROWS, min(int(cached * HBM_STAGING_SHARE), MAX_STAGING_BYTES // layout.row_bytes))
    return HbmSize(cached, MIN_OVERFLOW_ROWS + int(cached * OVERFLOW_SHARE), staging)


def hbm_bytes_of(layout: RowLayout, cached: int) -> int:
    """Device memory of a pool with so many cached rows; what ``HbmPool.size_bytes`` says."""
    size = _hbm_size(layout, cached)
    index = -(-cached // WAYS) * WAYS * INDEX_BYTES + size.overflow_rows * OVERFLOW_INDEX_BYTES + SUMMARY_BYTES
    return (cached + size.overflow_rows) * layout.row_bytes + index


def _words(layout: RowLayout) -> dict[str, int]:
    return {"weight_words": layout.weight_words, "state_words": layout.state_words}
