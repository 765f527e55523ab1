"""Tables that become larger, get another name, features, rules of ids or optimizer, or go, in place.

A table is a place in the manifest, and its rows carry the number of the place. So what only concerns how a table is
called, looked up or how large it is is a new manifest, written atomically. A table that is dropped leaves its place
empty. One with another optimizer moves to a new place, with the table of its ids if they are dynamic, as its rows get
another layout:

1. a manifest with a new place, empty;
2. the rows with new state, for that place, and a commit with them: no other version is kept, as none has these rows;
3. a manifest with the table in the new place, and with the old one empty.

A process that ends before the third leaves the table as it was. Rows of an empty place are nobody's, and are deleted.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ..config import TableConfig
from ..errors import TableError
from ..io.base import ColdTier
from ..layout import KEY_ROW_BITS
from ..system.sizes import format_count
from .catalog import Catalog
from .pools import Pools
from .table import Table
from .version import ORIGIN_KEY, RANK_KEY, repack, unpack

_LOG: Final = logging.getLogger("tierstore")
_TRANSACTION_BYTES: Final = 4 << 20  # of rows that are moved at a time


def require_changeable(directory: Path, catalog: Catalog) -> None:
    """TableError unless the tables of a store may change now: where others decide about them, or rows were changed."""
    extra = catalog.version.extra
    if ORIGIN_KEY in extra:
        raise TableError(f"{directory} has the tables of the store that is published to it: change them there")
    if RANK_KEY in extra:
        raise TableError(
            f"{directory} is one rank's part of a sharded store: with tierstore reshard --plain make a store of all "
            "parts, change its tables, and reshard that"
        )
    if names := catalog.changed_tables:
        raise TableError(f"rows of table {names[0]!r} were changed since the last commit: commit or roll back before")


def drop(catalog: Catalog, table: Table) -> None:
    """Drop a table; nothing is cached."""
    manifest = catalog.manifest
    for place, each in enumerate(table.config.with_ids(table.index), table.index):
        manifest = manifest.with_place(place, each.dropped(place))
    catalog.change(manifest)


def change(cold: ColdTier, catalog: Catalog, pools: Pools, table: Table, config: TableConfig) -> Table:
    """Give a table another configuration; nothing is cached."""
    before, manifest = table.config, catalog.manifest
    if any(each.name == config.name for place, each in enumerate(manifest.tables) if place != table.index):
        raise TableError(f"there is a table {config.name!r}: choose another name")
    if config.num_embeddings < before.num_embeddings:
        raise ValueError(
            f"num_embeddings={config.num_embeddings} of {before.name!r} must be at least {before.num_embeddings}, "
            "as its rows stay; to leave some out, import what tierstore export writes into a new store"
        )
    if not config.keeps_ids_of(before):
        raise ValueError(
            f"ids={config.ids!r} cannot follow {before.ids!r} of {before.name!r}: what eviction goes by (uses, batches "
            "or minutes) and whether ids without a row are counted stay, and candidates do not become fewer; import "
            "what tierstore export writes into a table made with these rules"
        )
    catalog.require_possible(config)
    rule, other = before.optimizer, config.optimizer
    is_other = rule.kind != other.kind or rule.state_dim(before.embedding_dim) != other.state_dim(before.embedding_dim)
    if is_other and catalog.version.number:
        return _moved(cold, catalog, pools, table, config)
    for place, each in enumerate(config.with_ids(table.index), table.index):
        manifest = manifest.with_place(place, replace(each, init=manifest.tables[place].init))
    catalog.change(manifest)
    return catalog.tables[config.name]


def _moved(cold: ColdTier, catalog: Catalog, pools: Pools, table: Table, config: TableConfig) -> Table:
    manifest, place = catalog.manifest, len(catalog.manifest.tables)
    shift = place - table.index
    moved = {
        gone: each if each.ids else replace(each, init=each.init.of_place(gone))  # first values may go by ids
        for gone, each in enumerate(config.with_ids(place), table.index)
    }
    for gone, each in moved.items():
        manifest = manifest.with_table(each.dropped(gone + shift))
    catalog.change(manifest)
    with catalog.written_to(range(place, place + len(moved))):
        counts = [_copy(cold, catalog, gone, each, gone + shift, pools.epoch) for gone, each in moved.items()]
        version, number = catalog.version, pools.epoch
        payload = repack(version._replace(tables=catalog.states), version.lineage.following(version.number))
        pools.epoch, made = number + 1, unpack(number, payload)
        cold.commit(payload, number, keep=1)
        catalog.shown.version = made
        for gone, each in moved.items():
            manifest = manifest.with_place(gone, manifest.tables[gone].dropped(gone)).with_place(gone + shift, each)
        catalog.change(manifest)
    _LOG.warning(
        "table %r: the optimizer state of %s begins again, of %s in the place of %s",
        config.name, format_count(counts[0], "row"), config.optimizer.kind, table.config.optimizer.kind,
    )  # fmt: skip
    return catalog.tables[config.name]


def _copy(cold: ColdTier, catalog: Catalog, index: int, config: TableConfig, place: int, epoch: int) -> int:
    """Write a table's stored rows for another place, with state that begins; how many they are."""
    before, after = (each.layout(cold.page_bytes) for each in (catalog.manifest.tables[index], config))
    count = 0
    step = after.rows_within(_TRANSACTION_BYTES)
    for part in cold.stored_rows(index):
        for first in range(0, len(part), step):
            rows = part[first : first + step]
            slots, present = np.arange(len(rows), dtype=np.int32), np.empty(len(rows), np.bool_)
            weights, state = (
                np.zeros((len(rows), words), np.uint64) for words in (before.weight_words, before.state_words)
            )
            cold.read(rows | (index << KEY_ROW_BITS), slots, weights, state, present)
            state = np.zeros((len(rows), after.state_words), np.uint64)
            state.view(np.float32)[:, : after.state_dim] = config.optimizer.initial_state
            cold.write(rows | (place << KEY_ROW_BITS), slots, weights, state, epoch=epoch)
            count += len(rows)
    return count
