"""Rows of a sharded store move to other owners while it is open; see ``ShardedStore.rebalance``.

Local tables that are divided by rows have the shape of the whole: new owners write the rows into their own stores, and
the commit names them. Old owners' copies are never read, as rows are looked up where the commit says.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Final

import numpy as np
import torch

from ..errors import TableError
from ..exchange.rows import CHUNK_BYTES, read_rows, write_rows
from ..store import Store
from ..system.killpoints import reach
from ..system.signals import settle
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
    settle(30)
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


def _moves(table: ShardedTable, new: Sharding) -> list[tuple[int, int, range]]:
    """Rows that go from one rank to another, in order of the ranks."""
    found = []
    for old, own in product(table.shards, new.shards(table.config.num_rows, table.config.embedding_dim)):
        stop = min(old.first_row + old.num_rows, own.first_row + own.num_rows)
        if old.rank != own.rank and (rows := range(max(old.first_row, own.first_row), stop)):
            found.append((old.rank, own.rank, rows))
    return sorted(found, key=lambda move: move[:2])


def _move(table: ShardedTable, new: Sharding, ranks: Ranks) -> None:
    """Write rows at their new owners. A rank sends, and gets, about ``CHUNK_BYTES`` at a time."""
    local, rank, layout = table.local, ranks.rank, table.local.layout
    width = layout.stored_columns * layout.numpy_dtype.itemsize
    row_bytes = width + layout.state_dim * np.dtype(np.float32).itemsize
    moves, most = _moves(table, new), max(1, CHUNK_BYTES // (ranks.size * row_bytes))
    for first in range(0, max((len(rows) for *_, rows in moves), default=0), most):
        runs = [(source, target, part) for source, target, rows in moves if (part := rows[first : first + most])]
        given, taken, sent = [0] * ranks.size, [0] * ranks.size, [np.empty((0, row_bytes), np.uint8)]
        with ranks.together(f"rebalance of {table.name}", then=1):
            for source, target, rows in runs:
                if target == rank:
                    taken[source] = len(rows)
                if source == rank:
                    given[target] = len(rows)
                    sent.append(np.hstack([each.view(np.uint8) for each in read_rows(local, rows.start, rows.stop)]))
        got = torch.split(ranks.exchange(torch.from_numpy(np.concatenate(sent)), given, taken), taken)
        with ranks.telling():
            for source, target, rows in runs:
                if target == rank:
                    values = got[source].numpy()
                    weights: Any = np.ascontiguousarray(values[:, :width]).view(layout.numpy_dtype)
                    write_rows(local, rows.start, weights, np.ascontiguousarray(values[:, width:]).view(np.float32))
            reach("rebalance: rows written")
