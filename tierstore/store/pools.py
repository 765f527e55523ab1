"""Making the pools of a store: its budgets divided among row layouts, a cache for each, the device tier above."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .. import cache
from ..errors import TableError
from ..hbm.build import add_hbm
from ..hbm.pool import HbmSize, host_bytes_of
from ..io import ColdTier
from ..kernels.threads import Workers
from ..pool import Pool
from ..pool.converting import RowSource
from ..rows import RowLayout
from ..system.device import memory_bytes
from ..system.sizes import parse_size, require_memory
from .budget import PoolSize, divide, divide_hbm
from .table import Table

__all__ = ["Memory", "Pools", "require_unused", "retire"]

_MANY_BYTES: Final = 2**62
"""Of which no percentage that is not zero is no byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a store may use, as its owner wrote it.

    Attributes:
        ddr, hbm: budgets, see ``open_store``.
        device: of the tier above host memory.
        policy: of the caches.
    """

    ddr: int | str
    hbm: int | str
    device: torch.device
    policy: str

    @property
    def has_hbm(self) -> bool:
        """Whether a tier in device memory is asked for."""
        return self.device.type != "cpu" or parse_size(self.hbm, name="hbm", table_bytes=_MANY_BYTES) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a store, and the bytes of the budget that are none of theirs."""

    by_layout: dict[RowLayout, Pool]
    reserved_bytes: int

    @classmethod
    def build(
        cls,
        tables: Sequence[Table],
        memory: Memory,
        cold: ColdTier,
        workers: Workers,
        *,
        epoch: int,
        readonly: bool,
        read: RowSource,
    ) -> "Pools":
        """One pool a row layout.

        Args:
            epoch: the version that rows are written for.
            read: brings rows in, as their tables' layouts have them.

        Raises:
            BudgetError: a budget is too small, or larger than what the machine has free.
        """
        table_bytes = sum(table.size_bytes for table in tables)
        rows: dict[RowLayout, int] = {}
        for table in tables:
            rows[table.layout] = rows.get(table.layout, 0) + table.config.num_embeddings
        hbm_sizes = _hbm_sizes(rows, table_bytes, memory)
        staging = sum(host_bytes_of(layout, size) for layout, size in hbm_sizes.items())
        budget = parse_size(memory.ddr, name="ddr", table_bytes=table_bytes)
        division = divide(
            budget, rows, num_tables=len(tables), policy=memory.policy, given=memory.ddr, hbm_staging=staging
        )
        pools = {
            layout: Pool(
                layout,
                _make_cache(tables, layout, size, memory.policy),
                cold,
                workers,
                transaction_bytes=division.transaction_bytes,
                outbox_rows=size.outbox_rows,
                epoch=epoch,
                readonly=readonly,
                read=read,
            )
            for layout, size in division.pools.items()
        }
        for table in tables:
            pools[table.layout].filler.add_table(table.index, table.config)
        if hbm_sizes:
            add_hbm(pools.values(), hbm_sizes, device=memory.device, policy=memory.policy, given=memory.hbm)
        # Memory is taken as rows come in; better an error here than the end of the process then.
        taken = division.reserved_bytes + sum(pool.size_bytes for pool in pools.values())
        require_memory(taken, f"ddr={memory.ddr!r}")
        return cls(by_layout=pools, reserved_bytes=division.reserved_bytes)


def _hbm_sizes(rows: dict[RowLayout, int], table_bytes: int, memory: Memory) -> dict[RowLayout, HbmSize]:
    """Empty without a device tier."""
    budget = parse_size(memory.hbm, name="hbm", table_bytes=table_bytes, memory_bytes=memory_bytes(memory.device))
    if not budget and memory.device.type == "cpu":
        return {}
    return divide_hbm(budget, rows, policy=memory.policy, given=memory.hbm)


def _make_cache(tables: Sequence[Table], layout: RowLayout, size: PoolSize, policy: str) -> cache.RowCache:
    words = {"weight_words": layout.weight_words, "state_words": layout.state_words}
    if not size.is_full:
        return cache.make_cache(policy, size.cached_rows, **words)
    own = {table.index: table.config.num_embeddings for table in tables if table.layout == layout}
    return cache.FullCache(own, **words)


def retire(pools: Collection[Pool]) -> None:
    """Write dirty rows back and have all pools refuse further use. TableError if rows are in use."""
    while not _refuse_if_clean(pools):
        require_unused(pools, "create tables")
        for pool in pools:
            pool.flush()


def require_unused(pools: Collection[Pool], action: str) -> None:
    """TableError, which says what to do before, if rows are in use."""
    if not all(pool.becomes_unused() for pool in pools):
        raise TableError(
            f"rows are in use by a batch under way (prefetched, or its backward still to come); {action} before"
        )


def _refuse_if_clean(pools: Collection[Pool]) -> bool:
    """Have all pools refuse further use, if no row is in use or to be written: another thread may have written one
    since they were flushed."""
    with contextlib.ExitStack() as stack:
        for pool in pools:
            stack.enter_context(pool.arena.lock)
        if any(pool.in_use or not pool.is_clean for pool in pools):
            return False
        for pool in pools:
            pool.arena.refuse()
        return True
