"""The pools of a store: its budgets divided among row layouts, a cache for each, the tier in device memory above."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .. import cache
from ..errors import TableError
from ..hbm.base import IN_USE
from ..hbm.build import add_hbm, hbm_stats
from ..io import ColdTier
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..pool import Pool
from ..pool.stats import IdStats, Stats, TierStats, of_counters
from ..system.device import memory_bytes
from ..system.flag import Flag
from ..system.sizes import file_memory_bytes, parse_size, require_memory
from .budget import divide, divide_hbm
from .catalog import Catalog
from .table_ids import ids_bytes

_MANY_BYTES: Final = 2**62  # of which no percentage that is not zero is no byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a store may use, as its owner wrote it: see ``open_store``."""

    ddr: int | str
    hbm: int | str
    device: torch.device
    policy: str

    @property
    def has_hbm(self) -> bool:
        return self.device.type != "cpu" or parse_size(self.hbm, name="hbm", table_bytes=_MANY_BYTES) > 0


class Pools:
    """One pool for each row layout. They are made at first use, when all tables are known.

    Attributes:
        lock: held while pools are made, closed or frozen, and while tables come or go.
        reserved_bytes: of the memory budget, what is no pool's.
    """

    def __init__(self, memory: Memory, cold: ColdTier, workers: Workers, catalog: Catalog, *, readonly: bool) -> None:
        self.lock = threading.RLock()
        self.reserved_bytes = 0
        self._memory = memory
        self._cold = cold
        self._workers = workers
        self._catalog = catalog
        self._readonly = readonly
        self._by_layout: dict[RowLayout, Pool] = {}

    def __iter__(self) -> Iterator[Pool]:
        return iter(list(self._by_layout.values()))

    def of(self, layout: RowLayout) -> Pool:
        """The pool that rows of this layout live in. BudgetError if a budget is too small, or larger than what the
        machine has free."""
        with self.lock:
            if not self._by_layout:
                self._by_layout = self._build()
            return self._by_layout[layout]

    def look(self) -> None:
        """ValueError for what a device found wrong with ids and no call has raised yet. Waits for it."""
        for pool in self:
            pool.tier.look()

    def require_unused(self, action: str) -> None:
        """TableError, which says what to do before, if rows are in use; errors as ``look``."""
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

    def retire(self) -> None:
        """Write dirty rows back and forget the caches; the next use makes new ones. TableError if rows are in use."""
        with self.lock:
            self.look()
            try:
                while not self._refuse_if_clean():  # another thread may have written a row since they were flushed
                    self.require_unused("create and change tables, or move rows,")
                    for pool in self:
                        pool.flush()
            finally:
                if any(pool.is_closed for pool in self):
                    self.close()

    def _refuse_if_clean(self) -> bool:
        """Have all pools refuse further use, if no row is in use or dirty."""
        with contextlib.ExitStack() as stack:
            for pool in self:
                stack.enter_context(pool.tier.lock)
            for pool in self:
                stack.enter_context(pool.arena.lock)
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
        """Forget the caches, with what is dirty in them."""
        before, self._by_layout = self._by_layout, {}
        for pool in before.values():
            pool.close()

    def _build(self) -> dict[RowLayout, Pool]:
        memory, tables, rows = self._memory, list(self._catalog.tables.values()), Counter[RowLayout]()
        for table in tables:
            rows[table.layout] += len(table.rows)
        table_bytes = sum(table.size_bytes for table in tables)
        hbm_sizes = {}
        if memory.has_hbm:
            budget = parse_size(
                memory.hbm, name="hbm", table_bytes=table_bytes, memory_bytes=memory_bytes(memory.device)
            )
            if memory.device.type == "cpu":
                require_memory(budget, f"hbm={memory.hbm!r}")
            hbm_sizes = divide_hbm(budget, rows, given=memory.hbm)
        division = divide(
            parse_size(memory.ddr, name="ddr", table_bytes=table_bytes), rows, num_tables=len(tables),
            policy=memory.policy, given=memory.ddr, ids_bytes=self._ids_bytes,
            hbm_staging=sum(size.host_bytes(layout) for layout, size in hbm_sizes.items()),
        )  # fmt: skip
        read, pools = self._catalog.source(self._cold.read), {}
        for layout, size in division.pools.items():
            words = {"weight_words": layout.weight_words, "state_words": layout.state_words}
            own = {table.index: table.rows for table in tables if table.layout == layout}
            pools[layout] = Pool(
                layout,
                cache.FullCache(own, **words)
                if size.is_full
                else cache.make_cache(memory.policy, size.cached_rows, **words),
                self._cold, self._workers, transaction_bytes=division.transaction_bytes, outbox_rows=size.outbox_rows,
                epoch=self._catalog.epoch, readonly=self._readonly, read=read,
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
        """Running totals of each tier since the store was opened."""
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
            lookups=counters.rows_read,
            unique=counters.rows_read,
            hits=counters.rows_read - counters.rows_absent,
            misses=counters.rows_absent,
            capacity_rows=sum(len(table.rows) for table in list(self._catalog.tables.values())),
            bytes=cold.map_bytes,
            held_bytes=cold.held_bytes,
            seconds=counters.read_seconds + counters.write_seconds,
            bytes_read=counters.pages_read * cold.page_bytes,
            bytes_written=counters.bytes_written,
            rows_written=counters.rows_written,
            bytes_moved=counters.bytes_moved,
            rows_moved=counters.rows_moved,
            pages_moved=counters.pages_moved,
            page_cache_bytes=file_memory_bytes(),
        )
        return Stats(hbm_stats(pools), ddr, ssd, ids)
