"""Another number of ranks, or another plan: rows are streamed from the parts that there are to new ones."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import StoreNotFoundError, TableError, TierstoreError
from ..exchange.rows import chunks, read_rows, write_rows
from ..store import Store, Table, open_store
from ..store.manifest import MANIFEST_NAME
from ..system.durable import names_in
from .commits import Commits, packed
from .parts import Parts, Source, newest_set, of_columns, open_parts, part_sets
from .plan import Plan, Shard, Sharding
from .table import ShardedTable, local_config

Progress = Callable[[int, int], None]
_DDR: Final = "128MiB"
"""Of a store that is made."""


def _no_progress(_done: int, _total: int) -> None:
    pass


def other_source(directory: Path, size: int) -> Source | None:
    """The parts with the newest commit, if another number of ranks wrote them; to be asked before any part is made.

    Raises:
        StoreNotFoundError: not all of their parts are here, or one process wrote a store here.
    """
    if (directory / MANIFEST_NAME).exists():
        raise StoreNotFoundError(
            f"{directory} was written by one process: go on in one, without torchrun, divide it by tierstore reshard "
            f"{directory} NEW_DIR --ranks {size}, or choose another folder"
        )
    if not set(part_sets(directory)) - {size}:
        return None
    found = newest_set(directory)
    return None if found.size == size else found


def own_part(directory: Path, source: Source | None, rank: int, size: int, planned: Mapping[str, Sharding]) -> Path:
    """The folder of a rank's part, which is made of the ``source``, if there is one."""
    own = directory / f"{rank}-of-{size}"
    if source is not None:
        with open_parts(directory, source) as parts:
            if not _has(own, parts):
                write_part(parts, own, rank, resized(parts, size, planned))
    return own


def remove_others(directory: Path, size: int) -> None:
    """Delete the parts of other numbers of ranks, once all ranks have theirs."""
    for others, parts in part_sets(directory).items():
        for part in parts if others != size else ():
            shutil.rmtree(part.path, ignore_errors=True)  # other ranks do the same


def _has(path: Path, parts: Parts) -> bool:
    """Whether it holds what ``parts`` do; what is older, or was cut short, is deleted."""
    if not path.exists():
        return False
    with contextlib.suppress(TierstoreError), open_store(path, mode="r", ddr="16MiB") as store:
        commits = Commits.of(store)
        if commits.run == parts.run and parts.number in commits.versions:
            return True
    shutil.rmtree(path)
    return False


def resized(parts: Parts, size: int, planned: Mapping[str, Sharding]) -> Plan:
    """How so many ranks share the tables: as planned, else as they did where possible, else by rows."""
    return Plan(size, {name: planned.get(name) or _resized(parts, name, size) for name in parts.shardings})


def _resized(parts: Parts, name: str, size: int) -> Sharding:
    sharding, everybody = parts.shardings[name], tuple(range(size))
    if sharding.sharding_type == "table_wise":
        return sharding._replace(ranks=(sharding.ranks[0] % size,))
    if sharding.sharding_type == "column_wise" and parts.store[name].config.embedding_dim % size:
        return sharding._replace(sharding_type="row_wise", ranks=everybody)
    return sharding._replace(ranks=everybody)


class _Piece(NamedTuple):
    """A table of a new store, and what it has of the whole one."""

    table: Table
    shard: Shard


def write_part(parts: Parts, path: Path, rank: int, plan: Plan, progress: Progress = _no_progress) -> None:
    """Make a rank's part; it appears with its first commit."""
    with open_store(path, keep=2, ddr=_DDR) as local:
        pieces = []
        for name, whole in parts.store.tables.items():
            sharding = plan.tables[name]
            made = local.create_table(local_config(whole.config, sharding, rank))
            shards = ShardedTable(whole.config, sharding, made, rank).shards
            pieces += [_Piece(made, shard) for shard in shards if shard.rank == rank]
        _copy(parts, local, pieces, progress)
        shardings = {name: each.to_json() for name, each in plan.tables.items()}
        extra = packed(parts.run, parts.number, {}, shardings, parts.store.extra)
        local.commit(extra=extra, tensors=parts.store.tensors())


def write_plain(parts: Parts, path: Path, progress: Progress) -> None:
    """Make a store that is not sharded, for one process."""
    with open_store(path, ddr=_DDR) as store:
        pieces = [
            _Piece(store.create_table(config), Shard(0, 0, config.num_embeddings, 0, config.embedding_dim))
            for config in (whole.config for whole in parts.store.tables.values())
        ]
        _copy(parts, store, pieces, progress)
        store.commit(extra=parts.store.extra, tensors=parts.store.tensors())


def _copy(parts: Parts, store: Store, pieces: Sequence[_Piece], progress: Progress) -> None:
    """Rows with optimizer state, and what the optimizers of all tables need beside them."""
    done, total = 0, sum(shard.num_rows for _, shard in pieces)
    for table, shard in pieces:
        for start, stop in chunks(table):
            whole = parts.store[table.name]
            write_rows(table, start, *of_columns(read_rows(whole, start, stop), whole.config, shard))
            done += stop - start
            progress(done, total)
    for name, table in store.tables.items():
        table.restore(parts.store[name].state)


def reshard(source: Path, target: Path, *, plan: Plan | None, num_ranks: int, progress: Progress) -> str:
    """Copy a store, sharded or not, for another number of ranks.

    Args:
        target: a new or empty folder.
        plan: of so many ranks, or None: tables stay sharded as they are where possible, else become row-wise.
        num_ranks: 0: make a store that is not sharded.

    Returns:
        what was done, in words.

    Raises:
        ValueError: the plan is for another number of ranks. TierstoreError: the target is not empty.
        TableError: rows are quantized. StoreNotFoundError: not all parts are there.
    """
    if target.exists() and names_in(target):
        raise TierstoreError(f"{target} is not empty; give a new folder")
    if plan is not None and plan.world_size != num_ranks:
        raise ValueError(f"--plan is for {plan.world_size} ranks, and --ranks says {num_ranks}")
    with open_parts(source) as parts:
        for name, table in parts.store.tables.items():
            if table.layout.is_quantized:
                raise TableError(
                    f"table {name!r} of {source} has {table.config.dtype} rows, which reshard does not copy: reshard "
                    "the store that it was quantized from; tierstore backup copies this one as it is"
                )
        if not num_ranks:
            write_plain(parts, target, progress)
        else:
            wanted = resized(parts, num_ranks, {} if plan is None else plan.tables)
            for rank in range(num_ranks):
                write_part(parts, target / f"{rank}-of-{num_ranks}", rank, wanted, progress)
        kind = f"for {num_ranks} rank{'s' * (num_ranks > 1)}" if num_ranks else "not sharded"
        return f"{target}: {len(parts.shardings)} tables of {source}, commit {parts.number}, {kind}"
