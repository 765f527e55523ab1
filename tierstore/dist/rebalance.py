"""Rows of a sharded store move to other owners while it is open; see ``ShardedStore.rebalance``.

Local tables that are divided by rows have the shape of the whole. So new owners write the rows into their own stores,
and the commit names them. Old owners' copies are never read, as rows are looked up where the commit says; a row that
comes back is overwritten.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..errors import TableError
from ..exchange.rows import CHUNK_BYTES, read_rows, write_rows
from ..store import Store
from ..system.killpoints import reach
from .plan import Sharding
from .ranks import Ranks
from .table import ShardedTable

_WAY: Final = (
    "leave it out of the plan, or copy the store by tierstore reshard OLD NEW --ranks N --plan FILE and use that"
)


def require_idle(local: Store, ranks: Ranks) -> None:
    """TableError if a prefetch pass or gradients go by the owners of now. ReadOnlyError, PartlyTrainedError."""
    local.require_writable()
    local.require_whole_steps()
    if ranks.has_busy_twin:
        raise TableError("a prefetch pass is in flight; end it before rows move")
    if local.optimizer_in_use is not None and local.optimizer_in_use.has_grad:
        raise TableError("store.optimizer() has gradients of rows; call its step() and zero_grad() before rows move")


def require_movable(tables: Iterable[ShardedTable], planned: Mapping[str, Sharding]) -> None:
    """TableError if a table cannot get its planned sharding while it is in use."""
    for table in tables:
        old, new, reason = table.sharding, planned.get(table.name, table.sharding), ""
        if "data_parallel" in (old.sharding_type, new.sharding_type) or old.exchange != new.exchange:
            reason = f'modules look it up as {old.sharding_type} with exchange="{old.exchange}"'
        elif old.parts > 1 or new.parts > 1:
            reason = "ranges of columns are tables of another shape"
        elif table.config.ids is not None and old.ranks != new.ranks:
            reason = f"its dynamic ids belong to the ranks {list(old.ranks)}"
        if reason and new != old:
            raise TableError(f"table {table.name!r} cannot become {new} in an open store: {reason}; {_WAY}")


@contextlib.contextmanager
def moved_rows(
    tables: Iterable[ShardedTable], planned: Mapping[str, Sharding], local: Store, ranks: Ranks
) -> Iterator[None]:
    """New owners have their rows within, too; if that, or what is within, fails, tables are as before. Collective.
    TableError: rows are in use. Others as of ``Store.use_rows`` and ``write_rows``."""
    moved = [(table, new) for table in tables if (new := planned.get(table.name, table.sharding)) != table.sharding]
    try:
        with ranks.together("rebalance"):
            local.use_rows({table.name: _hull(table, new, ranks.rank) for table, new in moved})
        for table, new in moved:
            _move(table, new, ranks)
        yield
    except BaseException:
        for table, _ in moved:
            table.take(table.sharding)  # caches are made for more rows, which does no harm
        raise


def _hull(table: ShardedTable, new: Sharding, rank: int) -> range:
    """A rank's rows of before and after, and those between."""
    shards = (*table.shards, *new.shards(table.config.num_rows, table.config.embedding_dim))
    own = [(each.first_row, each.first_row + each.num_rows) for each in shards if each.rank == rank]
    return range(min(own)[0], max(stop for _, stop in own)) if own else table.local.rows


class _Run(NamedTuple):
    """Rows that go from one rank to another at once."""

    source: int
    target: int
    start: int
    stop: int


def _rounds(table: ShardedTable, new: Sharding, most: int) -> Iterator[list[_Run]]:
    """Runs of at most so many rows, one of each source at a time; the same on all ranks."""
    of_source: dict[int, list[_Run]] = {}
    for old in table.shards:
        for own in new.shards(table.config.num_rows, table.config.embedding_dim):
            stop = min(old.first_row + old.num_rows, own.first_row + own.num_rows)
            for start in range(max(old.first_row, own.first_row), stop if old.rank != own.rank else 0, most):
                of_source.setdefault(old.rank, []).append(_Run(old.rank, own.rank, start, min(start + most, stop)))
    for runs in zip_longest(*of_source.values()):
        yield [run for run in runs if run is not None]


def _move(table: ShardedTable, new: Sharding, ranks: Ranks) -> None:
    """Write rows at their new owners. A rank sends, and gets, about ``CHUNK_BYTES`` at a time."""
    local, rank, layout = table.local, ranks.rank, table.local.layout
    width = layout.stored_columns * layout.numpy_dtype.itemsize
    row_bytes = width + layout.state_dim * np.dtype(np.float32).itemsize
    for runs in _rounds(table, new, max(1, CHUNK_BYTES // (ranks.size * row_bytes))):
        given, taken = [0] * ranks.size, [0] * ranks.size
        sent = torch.empty((0, row_bytes), dtype=torch.uint8)
        with ranks.together(f"rebalance of {table.name}", then=1):
            for source, target, start, stop in runs:
                if target == rank:
                    taken[source] = stop - start
                if source == rank:
                    given[target] = stop - start
                    sent = torch.from_numpy(np.hstack([part.view(np.uint8) for part in read_rows(local, start, stop)]))
        got = torch.split(ranks.exchange(sent, given, taken), taken)
        with ranks.telling():
            for run in runs:
                if run.target == rank:
                    rows = got[run.source].numpy()
                    weights: Any = np.ascontiguousarray(rows[:, :width]).view(layout.numpy_dtype)
                    write_rows(local, run.start, weights, np.ascontiguousarray(rows[:, width:]).view(np.float32))
            reach("rebalance: rows written")
