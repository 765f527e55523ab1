"""Another number of ranks, or another plan: rows are streamed from the parts that there are to new ones."""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..errors import TableError
from ..exchange.rows import chunks, read_keys, read_rows, write_rows
from ..io.files import ROW_FILE_NAME, rows_path
from ..io.lmdb import LmdbColdTier
from ..store import Table, open_store
from ..store.directory import new_store, open_files, require_outside
from ..store.manifest import MANIFEST_NAME
from ..store.stored_ids import ids_bytes
from ..system.files import require_room
from .owners import ShardedTable, local_config, whole_config
from .parts import Commits, Parts, of_columns, open_parts
from .plan import Plan, Shard, Sharding

Progress = Callable[[int, int], None]
WORK_NAME: Final = "reshard.partial"  # where in the target a copy is made; what is in it may be deleted
_DDR: Final = 128 * 2**20
_PLAIN: Final = Sharding("table_wise", (0,))
_EMPTY_BYTES: Final = 128 * 2**10
"""Of a store without rows."""


def resized(parts: Parts, size: int, planned: Mapping[str, Sharding]) -> Plan:
    """How so many ranks share the tables: as planned, else as they did where possible, else by rows."""
    return Plan(size, {name: planned.get(name) or _resized(parts, name, size) for name in parts.shardings})


def _resized(parts: Parts, name: str, size: int) -> Sharding:
    sharding, everybody = parts.shardings[name], tuple(range(size))
    if sharding.sharding_type == "table_wise":
        return sharding._replace(ranks=(sharding.ranks[0] % size,))
    resized = sharding._replace(ranks=everybody)
    if size % sharding.column_ranges or parts.store[name].config.embedding_dim % resized.parts:
        return resized._replace(sharding_type="row_wise", column_ranges=1)
    return resized


def write_part(parts: Parts, path: Path, rank: int, plan: Plan) -> None:
    """Make a rank's part in a folder, whose manifest comes last; see ``new_store``, also for errors."""
    with new_store(path, WORK_NAME) as work:
        _write(parts, work, rank, plan, lambda *_: None)


def _write(parts: Parts, path: Path, rank: int, plan: Plan | None, progress: Progress) -> None:
    """Make a rank's part, or without a plan a store that is not sharded."""
    ddr = _DDR + sum(ids_bytes(table.config) for table in parts.store.tables.values())
    with open_store(path, keep=2, ddr=ddr) as local:
        pieces, extra, place = list[tuple[Table, Shard]](), parts.store.extra, 0
        for name, whole in parts.store.tables.items():
            config, sharding = whole.config, _PLAIN if plan is None else plan.tables[name]
            if whole.index != place and whole.ids is None:  # a table before it is gone, so its place is another
                config = replace(config, init=config.init.of_place(whole.index))
            place += 1 + (whole.ids is not None)
            table = local.create_table(local_config(config, sharding, rank))
            shards = ShardedTable(whole_config(table.config, sharding), sharding, table, rank).shards
            pieces += [(table, shard) for shard in shards if shard.rank == rank]
        done, total = 0, sum(shard.num_rows for _, shard in pieces)
        for table, shard in pieces:
            for count in copied(parts.store[table.name], table, shard):
                done += count
                progress(done, total)
        for name, table in local.tables.items():  # what optimizers need besides, of those without rows here too
            table.restore(parts.store[name].state)
        if plan is not None:
            commit_id = made_id(parts, plan)
            commits = Commits(parts.run, {}, to_json(plan), {parts.number: commit_id} if commit_id else {})
            extra = commits.packed(rank, plan.world_size, parts.number, extra)
        local.commit(extra=extra, tensors=parts.store.tensors())
    with rows_path(path).open("rb") as file:
        os.fsync(file.fileno())  # the device has the row file whole, so it needs no anchor


def made_id(parts: Parts, plan: Plan) -> str:
    """The identity of their commit in parts that a plan makes of them; "" if theirs is not known."""
    commit_id = parts.store.commit_id(parts.number)
    named = f"{commit_id} {json.dumps(to_json(plan), sort_keys=True)}"
    return hashlib.sha256(named.encode()).hexdigest()[:16] if commit_id else ""


def to_json(plan: Plan) -> dict[str, Any]:
    """The sharding of each table, as a commit keeps it."""
    return {name: each.to_json() for name, each in plan.tables.items()}


def stored_rows(parts: Parts, paths: Sequence[Path]) -> Counter[str]:
    """How many rows of each table some of the parts hold; of a table that all ranks have a row of, their share."""
    found = Counter[str]()
    for path in paths:
        manifest, cold, _ = open_files(path, readonly=True)
        assert isinstance(cold, LmdbColdTier), "it is one rank's, or of one process"
        with contextlib.closing(cold):
            cold.set_tables(manifest.shapes)
            with cold.lease() as (_, rows):
                counts = rows.counts()
        for config, count in zip(manifest.tables, counts, strict=True):
            if config.is_hidden:
                continue
            sharding = parts.shardings[config.name]
            is_copied = sharding.sharding_type == "data_parallel"
            found[config.name] += -(-count // (len(sharding.ranks) if is_copied else sharding.parts))
    return found


def share_bytes(parts: Parts, plan: Plan, rank: int, stored: Mapping[str, int]) -> int:
    """About how many bytes a rank's part takes on SSD, of tables with so many stored rows."""
    total = _EMPTY_BYTES + sum(tensor.numel() * tensor.element_size() for tensor in parts.store.tensors().values())
    for name, whole in parts.store.tables.items():
        config, sharding, page_bytes = whole.config, plan.tables[name], whole.layout.page_bytes
        rows = min(stored[name], config.num_embeddings)  # former owners of a row may have it, too
        local = local_config(config, sharding, rank)
        layout = local.layout(page_bytes)
        for shard in sharding.shards(local.num_rows, config.embedding_dim):
            if shard.rank == rank:
                total += page_bytes * layout.pages_for(-(-rows * shard.num_rows // config.num_embeddings))
    return total


def copied(whole: Table, table: Table, shard: Shard) -> Iterator[int]:
    """Copy what a rank has of a table, with optimizer state; yields numbers of rows that are done."""
    keys = None if table.ids is None or whole.ids is None else table.ids.take_over(whole.ids)
    for start, stop in chunks(table):
        if keys is None:
            write_rows(table, start, *of_columns(read_rows(whole, start, stop), whole.config, shard))
        elif len(own := keys[start - table.rows.start : stop - table.rows.start]):
            write_rows(table, start, *read_keys(whole, own))
        yield stop - start


def reshard(source: Path, target: Path, *, plan: Plan | None, num_ranks: int, progress: Progress) -> str:
    """Copy a store, sharded or not, for another number of ranks.

    Args:
        target: must not exist, or be empty, or hold what a copy that was cut short left.
        plan: of so many ranks, or None: tables stay sharded as they are where possible, else become row-wise.
        num_ranks: 0: make a store that is not sharded.

    Returns:
        what was done, in words.

    Raises:
        ValueError: the plan is for another number of ranks; the target is inside the source.
        FileExistsError: the target holds something. FileNotFoundError: there is no directory to make it in.
        DiskFullError: too little free space. TierstoreError: the system refuses, or another process is at work there.
        TableError: rows are quantized. StoreNotFoundError: not all parts are there.
        Whatever is raised, nothing is left of the copy.
    """
    if plan is not None and plan.world_size != num_ranks:
        raise ValueError(f"--plan is for {plan.world_size} ranks, and --ranks says {num_ranks}")
    require_outside(target, source)
    with open_parts(source) as parts:
        for name, table in parts.store.tables.items():
            if table.layout.is_quantized:
                raise TableError(
                    f"table {name!r} of {source} has {table.config.dtype} rows, which reshard does not copy: reshard "
                    "the store that it was quantized from; tierstore backup copies this one as it is"
                )
        wanted = resized(parts, max(num_ranks, 1), {} if plan is None else plan.tables)
        folders = [f"{rank}-of-{num_ranks}" for rank in range(num_ranks)]
        with new_store(target, WORK_NAME, folders or (ROW_FILE_NAME, MANIFEST_NAME)) as work:
            stored = stored_rows(parts, parts.paths)
            require_room(work, sum(share_bytes(parts, wanted, rank, stored) for rank in range(wanted.world_size)))
            for rank, folder in enumerate(folders or ("",)):
                _write(parts, work / folder, rank, wanted if num_ranks else None, progress)
        kind = f"for {num_ranks} rank{'s' * (num_ranks > 1)}" if num_ranks else "not sharded"
        return f"{target}: {len(parts.shardings)} tables of {source}, commit {parts.number}, {kind}"
