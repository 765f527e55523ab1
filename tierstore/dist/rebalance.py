"""Rows of a sharded store move to other owners while the store is open; see ``ShardedStore.rebalance``.

The local tables of tables that are divided by rows have the shape of the whole. So a row moves as its bits: the new
owner writes them into its own store, for the commit that names the new owners. Old owners keep what they have, which
nobody reads there: rows are looked up where the commit says. A row that comes back is overwritten, written or not.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import TableError
from ..exchange.rows import CHUNK_BYTES, read_rows, write_rows
from ..store import Store
from ..system.killpoints import reach
from .plan import Sharding
from .ranks import Ranks
from .table import ShardedTable

_WAY: Final = (
    "tierstore reshard OLD_DIR NEW_DIR --ranks N --plan FILE makes a copy so, and all ranks start again on that; or "
    "leave the table out of the plan"
)


def require_idle(local: Store, ranks: Ranks) -> None:
    """TableError if a batch goes by the owners that rows have now, or a gradient is of rows of theirs. ReadOnlyError,
    ClosedError, PartlyTrainedError."""
    local.require_writable()
    local.require_whole_steps()
    if ranks.has_busy_twin:
        raise TableError("a prefetch pass is in flight; end it before rows move")
    if local.optimizer_in_use is not None and local.optimizer_in_use.has_grad:
        raise TableError("store.optimizer() has gradients of rows; call its step() and zero_grad() before rows move")


def require_movable(tables: Iterable[ShardedTable], planned: Mapping[str, Sharding]) -> None:
    """TableError if a table cannot get its planned sharding while it is in use."""
    for table in tables:
        new = planned.get(table.name, table.sharding)
        if new != table.sharding and (reason := _reason(table, new)):
            raise TableError(f"table {table.name!r} cannot become {_named(new)} in an open store: {reason}. {_WAY}")


def _reason(table: ShardedTable, new: Sharding) -> str:
    old = table.sharding
    if "data_parallel" in (old.sharding_type, new.sharding_type) or old.exchange != new.exchange:
        return f"modules look it up as {_named(old)}"
    if old.parts > 1 or new.parts > 1:
        return "ranges of columns are tables of another shape"
    if table.config.ids is not None and old.ranks != new.ranks:
        return f"its dynamic ids belong to the ranks {list(old.ranks)}"
    return ""


def _named(sharding: Sharding) -> str:
    return f'{sharding.sharding_type} with exchange="{sharding.exchange}"'


class _Run(NamedTuple):
    """Rows that go from one rank to another at once."""

    source: int
    target: int
    start: int
    stop: int


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
    """What a rank's local table is to hold while rows move: its rows of before and after, and those between."""
    shards = new.shards(table.config.num_rows, table.config.embedding_dim)
    later = [range(each.first_row, each.first_row + each.num_rows) for each in shards if each.rank == rank]
    held = [rows for rows in (table.rows, *later) if rows]
    return range(min(rows.start for rows in held), max(rows.stop for rows in held)) if held else table.local.rows


def _move(table: ShardedTable, new: Sharding, ranks: Ranks) -> None:
    """Write the table's rows, with optimizer state, at their new owners too. Collective. A rank holds some
    ``CHUNK_BYTES`` of rows at a time."""
    local, rank, layout = table.local, ranks.rank, table.local.layout
    width = layout.stored_columns * layout.numpy_dtype.itemsize
    row_bytes = width + layout.state_dim * np.dtype(np.float32).itemsize
    for runs in _rounds(table, new, max(1, CHUNK_BYTES // (ranks.size * row_bytes))):
        given, taken = [0] * ranks.size, [0] * ranks.size
        sent = torch.empty((0, row_bytes), dtype=torch.uint8)
        with ranks.together(f"rebalance of {table.name}", then=1):
            for run in runs:
                if run.source == rank:
                    given[run.target], sent = run.stop - run.start, _packed(read_rows(local, run.start, run.stop))
                if run.target == rank:
                    taken[run.source] = run.stop - run.start
        got = torch.split(ranks.exchange(sent, given, taken), taken)
        with ranks.telling():
            for run in runs:
                if run.target == rank:
                    rows = got[run.source].numpy()
                    weights: Any = np.ascontiguousarray(rows[:, :width]).view(layout.numpy_dtype)
                    state = np.ascontiguousarray(rows[:, width:]).view(np.float32)
                    write_rows(local, run.start, weights, state)
            reach("rebalance: rows written")


def _packed(rows: Iterable[Any]) -> Tensor:
    """uint8 [n, bytes of a row and its state]."""
    return torch.from_numpy(np.hstack([part.view(np.uint8) for part in rows]))


def _rounds(table: ShardedTable, new: Sharding, most: int) -> Iterator[list[_Run]]:
    """Runs of at most so many rows, one of each source at a time; the same on all ranks."""
    of_source: dict[int, list[_Run]] = {}
    for old in table.shards:
        for own in new.shards(table.config.num_rows, table.config.embedding_dim):
            start = max(old.first_row, own.first_row)
            stop = min(old.first_row + old.num_rows, own.first_row + own.num_rows)
            if old.rank != own.rank:
                parts = (_Run(old.rank, own.rank, each, min(each + most, stop)) for each in range(start, stop, most))
                of_source.setdefault(old.rank, []).extend(parts)
    for runs in zip_longest(*of_source.values()):
        yield [run for run in runs if run is not None]
