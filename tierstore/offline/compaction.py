"""A copy of a store whose rows lie in the order asked for, in full segments, without free space.

The source is read as one snapshot. For each version that it keeps, the rows that are others than in the version before
are appended to a new store: by their keys, or first those of a trace, most frequent first. A row's epoch in the copy is
the number of the first kept version that shows it. The copy is made and verified in a directory of its own within the
target and moved into its place at the end.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ..errors import DamagedError
from ..io.files import rows_path
from ..io.lmdb import LmdbColdTier
from ..io.reads import some_first, stored_batches
from ..io.records import read_head, read_payload, read_record
from ..io.row_map import RowMap
from ..io.segments import read_indexes, stored_segments
from ..io.snapshot import Snapshot
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..store.directory import bytes_on_device, new_store, new_tier, require_outside, verify_copy
from ..store.manifest import Manifest
from ..system.checks import excerpt
from ..system.files import RESTORE, require_room
from ..trace import Trace, read_trace

WORK_NAME: Final = "compact.partial"  # where in the target a copy is made; what is in it may be deleted
_BATCH_BYTES: Final = 8 << 20  # of segments that are written in one transaction


class CompactReport(NamedTuple):  # ``segments`` are of all versions, bytes those that row files take on the device
    target: Path
    version: int
    segments: int
    rows: int
    bytes_before: int
    bytes_after: int


def compact_store(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CompactReport:  # fmt: skip
    """Copy a store, all versions that it keeps, into full segments with rows in key order; then verify the copy. With a
    trace, rows that it reads come first, most frequent first, so that one page has several of a batch's rows.

    The source is opened read-only and may be trained on meanwhile; what it has not committed is not in the copy. The
    copy has the same identity, to put in the source's place. Memory: 8 bytes a row, some 32 MiB, and the trace.

    Args:
        directory: the source.
        target: the copy's directory; must not exist, or be empty, or hold what a copy that was cut short left.
        trace: a file as trace.py describes it.
        progress: called as ``progress(done_bytes, total_bytes)``, of the copy and then of its verification.

    Raises:
        ValueError: the trace is none, or of other tables or rows than the store has; the target is inside the store.
        FileExistsError: the target holds something. FileNotFoundError: there is no directory to make it in.
        DiskFullError: too little free space for the copy. TierstoreError: the system refuses to write there.
        StoreNotFoundError, DamagedError: the source is none, or not sound; nothing is left of the copy.
    """
    source, target = Path(directory).absolute(), Path(target).absolute()
    known = Manifest.read(source)
    require_outside(target, source)
    lookups = None if trace is None else read_trace(trace)
    with new_store(target, WORK_NAME) as work:
        tier = LmdbColdTier(source, store_id=bytes.fromhex(known.store_id), readonly=True)
        with contextlib.closing(tier), tier.lease_tree() as snapshot:
            manifest = Manifest.read(source)  # a writer makes a table before it commits rows of it
            _copy_rows(snapshot, manifest, lookups, work, progress or (lambda *_: None))
        manifest.write(work)
        try:
            versions, found = verify_copy(work, progress)
        except DamagedError as error:
            words = f"the copy of {source} did not keep what was written to it; try again ({error})"
            raise DamagedError(words) from error
        sizes = bytes_on_device(source), bytes_on_device(work)
    return CompactReport(target, max(versions, default=0), found.segments, found.rows, *sizes)


def _copy_rows(
    snapshot: Snapshot, manifest: Manifest, trace: Trace | None, work: Path, progress: Callable[[int, int], None]
) -> None:
    """Write the versions that a snapshot keeps into a new row file, synced."""
    head, stored = read_head(snapshot), read_indexes(snapshot, stored_segments(snapshot))
    rows = RowMap(manifest.shapes)
    rows.enter(snapshot, stored, head.current, head.kept)
    if rows.unknown:
        words = f"{rows.unknown:,} rows of tables that its manifest does not have"
        raise DamagedError(f"{snapshot.path} has {words}. {RESTORE}")
    total = sum(int(segments.rows * layout.stored_row_bytes) for layout, segments in rows.segments.items())
    leading = _leading(trace, manifest)
    require_room(rows_path(work), total)
    with new_tier(work, manifest) as tier:
        rows, done, since = RowMap(manifest.shapes), 0, 0  # of each version in turn
        for version in head.kept:
            # No segment is of rows on both sides of a version.
            rows.enter(snapshot, stored[(stored["newest"] > since) & (stored["newest"] <= version)], version, ())
            for layout, first in leading.items():
                keys = some_first(rows, layout, first, since)
                for batch in stored_batches(snapshot, rows, keys, layout.rows_within(_BATCH_BYTES)):
                    tier.write(batch.keys, batch.slots, batch.weights, batch.state, epoch=version)
                    done += int(len(batch.keys) * layout.stored_row_bytes)
                    progress(done, total)
            tier.commit(read_payload(snapshot, read_record(snapshot, version)), version, keep=len(head.kept))
            since = version
        if head.last > head.current:  # numbers are not used again
            tier.commit(b"", head.last, keep=len(head.kept) + 1)
            tier.rollback(head.current)


def _leading(trace: Trace | None, manifest: Manifest) -> dict[RowLayout, Int64s]:
    """Which keys come first, by layout."""
    layouts = [config.layout(manifest.page_bytes) for config in manifest.tables]
    leading = dict.fromkeys(layouts, np.empty(0, np.int64))
    if trace is None:
        return leading
    sizes = {config.name: config.num_embeddings for config in manifest.tables}
    for name, table in trace.tables.items():
        if name not in sizes:
            raise ValueError(f"the trace has a table {excerpt(name)} and the store has none of that name")
        if (most := int(table.ids.max(initial=-1))) >= sizes[name]:
            raise ValueError(f"the trace has row {most} of table {excerpt(name)}, which has {sizes[name]} rows")
    if not trace.num_lookups:
        raise ValueError("the trace has no lookup; without --trace the copy has rows in order of their numbers")
    for layout in leading:
        own = {manifest.tables[index].name: index for index, each in enumerate(layouts) if each == layout}
        leading[layout] = keys_by_frequency(trace, own)
    return leading


def keys_by_frequency(trace: Trace, indexes: Mapping[str, int]) -> Int64s:
    """The distinct keys that a trace looks up, most frequent first, ties by first lookup. ``indexes``: of the tables
    that count, in the store, by name."""
    tables = {indexes[name]: table for name, table in trace.tables.items() if name in indexes}
    keys = [np.empty(0, np.int64), *((index << KEY_ROW_BITS) + table.ids for index, table in tables.items())]
    entries = (np.repeat(np.arange(trace.num_entries), np.diff(table.offsets)) for table in tables.values())
    order = np.argsort(np.concatenate([keys[0], *entries]), kind="stable")
    rows, first, counts = np.unique(np.concatenate(keys)[order], return_index=True, return_counts=True)
    ordered: Int64s = rows[np.lexsort((first, -counts))]
    return ordered
