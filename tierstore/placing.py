"""The rows of a store, all versions that it keeps, written anew so that each lies where a trace puts it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import TableConfig
from .excerpt import excerpt
from .io import LmdbColdTier
from .io.census import check_census, num_places, read_head, read_payload, read_record
from .io.directory import Directory
from .io.files import create_rows_file, rows_path
from .io.gather import GatherStatus, gather_error, geometry
from .io.placement import Area, Placement
from .io.reads import RowReader
from .io.records import first_records
from .io.snapshot import Snapshot
from .io.view import fill_directory
from .manifest import Manifest
from .packing import Accesses, order_by_co_access
from .rows import KEY_ROW_BITS, MAX_ROWS, RowLayout
from .trace import Trace

__all__ = ["plan_placement", "write_placed"]

Int64s = NDArray[np.int64]

_BATCH_BYTES: Final = 8 << 20
_STAGING_BYTES: Final = 1 << 20
_LISTED_BLOCKS: Final = 1 << 15


def plan_placement(tables: tuple[TableConfig, ...], page_bytes: int, trace: Trace) -> Placement | None:
    """Where the rows of a trace are to lie: those of one layout in one area, behind the first table of the layout.

    None if the trace has no lookup.

    Raises:
        ValueError: the trace is of other tables, or of rows that they do not have.
    """
    indexes = {config.name: index for index, config in enumerate(tables)}
    for name, table in trace.tables.items():
        if name not in indexes:
            raise ValueError(f"the trace has a table {excerpt(name)} and the store has none of that name")
        num_rows = tables[indexes[name]].num_embeddings
        if len(table.ids) and int(table.ids.max()) >= num_rows:
            raise ValueError(
                f"the trace has row {int(table.ids.max())} of table {excerpt(name)}, which has {num_rows} rows"
            )
    areas = []
    for layout in dict.fromkeys(config.layout(page_bytes) for config in tables):
        own = [index for index, config in enumerate(tables) if config.layout(page_bytes) == layout]
        accesses = _accesses(trace, {tables[index].name: index for index in own})
        if len(accesses.keys):
            first = layout.num_blocks(tables[own[0]].num_embeddings) * layout.rows_per_block
            areas.append(Area(own[0], first, order_by_co_access(accesses, layout.rows_per_block)))
    return Placement(areas) if areas else None


def _accesses(trace: Trace, indexes: dict[str, int]) -> Accesses:
    """The lookups of some tables, entry by entry."""
    chosen = [(index, trace.tables[name]) for name, index in indexes.items() if name in trace.tables]
    keys = [np.empty(0, np.int64), *((index << KEY_ROW_BITS) + table.ids for index, table in chosen)]
    lengths = [np.diff(table.offsets) for _, table in chosen]
    samples = [np.empty(0, np.int64), *(np.repeat(np.arange(trace.num_entries), length) for length in lengths)]
    order = np.argsort(np.concatenate(samples), kind="stable")
    starts = np.zeros(trace.num_entries + 1, np.int64)
    for length in lengths:
        starts[1:] += np.cumsum(length)
    return Accesses(np.concatenate(keys)[order], starts)


def write_placed(
    snapshot: Snapshot,
    manifest: Manifest,
    source: Placement | None,
    placement: Placement,
    work: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write the versions that a snapshot keeps into a new row file in ``work``, rows lying as the placement says.

    Args:
        manifest: of the store.
        source: where the rows of the snapshot lie.
        progress: called as ``progress(done_bytes, total_bytes)``, of what the snapshot takes.

    Raises:
        DamagedError: something in the snapshot is not what was written.
    """
    store_id = bytes.fromhex(manifest.store_id)
    create_rows_file(rows_path(work), first_records(store_id, placement.pack()), store_id)
    tier = LmdbColdTier(work, store_id=store_id, readonly=False, staging_bytes=_STAGING_BYTES, create=False)
    try:
        for index, config in enumerate(manifest.tables):
            tier.add_table(index, config.layout(manifest.page_bytes), config.num_embeddings)
        versions = _Versions(snapshot, manifest, source)
        head = read_head(snapshot)
        total = snapshot.limit_pages() * snapshot.page_bytes
        parts = len(head.kept) * len(versions.layouts)
        for number, version in enumerate(head.kept):
            versions.move(version)
            for part, layout in enumerate(versions.layouts, number * len(versions.layouts)):
                blocks = versions.changed_blocks(layout, tier)
                for done, rows in versions.read(layout, tier, blocks):
                    _write_changed(tier, rows, version)
                    progress(int(total * (part + done / len(blocks)) / parts), total)
            tier.commit(read_payload(snapshot, read_record(snapshot, version)), version, keep=len(head.kept))
        if head.last > head.current:  # numbers are not used again
            tier.commit(b"", head.last, keep=len(head.kept) + 1)
            tier.rollback(head.current)
    finally:
        tier.close()


class _Rows(NamedTuple):
    """Rows of one layout that are there."""

    keys: Int64s
    slots: NDArray[np.int32]
    """Where in the arenas they are."""
    weights: NDArray[np.uint64]
    state: NDArray[np.uint64]


class _Versions:
    """The rows of one snapshot as its versions show them, one version after another."""

    def __init__(self, snapshot: Snapshot, manifest: Manifest, placement: Placement | None) -> None:
        self._snapshot = snapshot
        self._placement = placement
        self._num_rows = np.array([config.num_embeddings for config in manifest.tables], np.int64)
        self._reader = RowReader(snapshot.file_map, verify=True)
        self._directory = Directory()
        for index, config in enumerate(manifest.tables):
            layout = config.layout(manifest.page_bytes)
            places = num_places(snapshot.path, placement, index, layout, config.num_embeddings)
            self._directory = self._directory.with_table(index, layout, places)
        self._before = self._directory
        self.layouts = list(dict.fromkeys(self._directory.layouts.values()))

    def move(self, version: int) -> None:
        """Show this version; changes are counted from the one shown before."""
        check_census(self._snapshot, read_record(self._snapshot, version))
        self._before, self._directory = self._directory, self._directory.emptied()
        fill_directory(self._directory, self._snapshot, version)

    def changed_blocks(self, layout: RowLayout, target: LmdbColdTier) -> Int64s:
        """First places, ascending, of the target's blocks that rows of changed blocks lie in."""
        per_block = layout.rows_per_block
        parts = [np.empty(0, np.int64)]
        tables = self._directory.tables
        for index in (index for index, other in self._directory.layouts.items() if other == layout):
            own = slice(int(tables.bases[index]), int(tables.bases[index] + tables.num_blocks[index]))
            changed = np.flatnonzero(self._directory.pages[own] != self._before.pages[own])
            for start in range(0, len(changed), _LISTED_BLOCKS):
                first = (index << KEY_ROW_BITS) + changed[start : start + _LISTED_BLOCKS] * per_block
                keys = self._real(self._rows_at((first[:, None] + np.arange(per_block)).ravel()))
                places = target.place(keys)
                rows = places & (MAX_ROWS - 1)
                parts.append(np.unique((places & -MAX_ROWS) | (rows - rows % per_block)))
        return np.unique(np.concatenate(parts))

    def _real(self, keys: Int64s) -> Int64s:
        """Without places behind a table's last row."""
        real: Int64s = keys[(keys & (MAX_ROWS - 1)) < self._num_rows[keys >> KEY_ROW_BITS]]
        return real

    def _rows_at(self, places: Int64s) -> Int64s:
        return places if self._placement is None else self._placement.rows_at(places)

    def read(self, layout: RowLayout, target: LmdbColdTier, blocks: Int64s) -> Iterator[tuple[int, _Rows]]:
        """The rows of these blocks of the target, a few MiB of whole blocks at a time, and how many blocks are done."""
        per_block = layout.rows_per_block
        step = max(1, _BATCH_BYTES // layout.block_bytes)
        for start in range(0, len(blocks), step):
            first = blocks[start : start + step]
            keys = self._real(target.rows_at((first[:, None] + np.arange(per_block)).ravel()))
            weights, state = _arenas(layout, len(keys))
            slots, present = np.arange(len(keys), dtype=np.int32), np.zeros(len(keys), np.bool_)
            places = keys if self._placement is None else self._placement.places(keys)
            geo = geometry(layout, self._directory.layout_id(layout))
            result = self._reader.gather(self._snapshot, self._directory, geo, places, slots, weights, state, present)
            if result[0] != GatherStatus.DONE:
                raise gather_error(self._snapshot.path, result, keys)
            yield start + len(first), _Rows(keys[present], slots[present], weights, state)


def _arenas(layout: RowLayout, rows: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return np.empty((rows, layout.weight_words), np.uint64), np.empty((rows, layout.state_words), np.uint64)


def _write_changed(tier: LmdbColdTier, rows: _Rows, version: int) -> None:
    """Write the rows that the tier does not have yet as they are."""
    if tier.version:
        weights, state = np.empty_like(rows.weights), np.empty_like(rows.state)
        present = np.zeros(len(rows.keys), np.bool_)
        tier.read(rows.keys, rows.slots, weights, state, present)
        same = (weights[rows.slots] == rows.weights[rows.slots]).all(axis=1)
        changed = ~present | ~same | (state[rows.slots] != rows.state[rows.slots]).any(axis=1)
        rows = rows._replace(keys=rows.keys[changed], slots=rows.slots[changed])
    tier.write(rows.keys, rows.slots, rows.weights, rows.state, epoch=version)
