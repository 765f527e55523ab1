"""What is sound of a damaged store, saved into a new one, and a list of what was lost.

Rows are those of the last version, each held against its own checksum (io/survivors.py). The new store keeps the
version's number. A row that was lost has its first value there, as if it had never been written.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import ChecksumError, DamagedError, FormatError, StoreNotFoundError, TruncatedError
from ..io.files import ROW_FILE_NAME, read_stamp, require_plain_files
from ..io.lmdb import LmdbColdTier
from ..io.mapped import FileMap, queue_parts
from ..io.places import Segments
from ..io.reader_locks import FileLocks
from ..io.row_map import RowMap
from ..io.survivors import LOST, Remains, Runs, choose_rows, choose_tree, read_rows, settled, surviving_rows
from ..layout import KEY_ROW_BITS
from ..store.directory import new_store, new_tier, require_outside, verify_copy
from ..store.manifest import MANIFEST_NAME, Manifest
from ..store.stored_ids import TableOfIds
from ..store.version import NO_LINEAGE, TableState, pack, repack, unpack
from ..system.checks import excerpt
from ..system.sizes import format_count

LOST_NAME: Final = "lost.txt"  # in the new store: what was lost, a line each
WORK_NAME: Final = "repair.partial"  # where in the target the store is made; what is in it may be deleted
_BATCH_BYTES: Final = 8 << 20
_SHOWN: Final = 20


class Loss(NamedTuple):
    table: str
    first: int  # row that was lost, and those up to the last
    last: int


@dataclass(kw_only=True)
class SalvageReport:
    """What was saved of ``version``, and what was not.

    Attributes:
        lost: what was lost of each table, in order; rows without proof that they are of the version are among it.
        missing: segments of which not all rows are known; rows that only they held are not in ``lost``. -1 where a part
            of the tree that leads to segments is damaged.
        unproven: rows taken, with ``stale_ok``, that are or may be older than the version.
        payload_lost: extra, tensors and the tables' steps are gone. doubts: what could not be proven, in sentences.
    """

    directory: Path
    target: Path
    version: int = 0
    rows: int = 0
    lost: list[Loss] = field(default_factory=list)
    missing: int = 0
    unproven: int = 0
    payload_lost: bool = False
    doubts: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:  # all of the version was saved, for certain
        return not (self.lost or self.missing or self.unproven or self.payload_lost or self.doubts)

    def describe(self) -> str:
        saved = f"{self.target}: version {self.version}, {self.rows:,} rows saved and verified"
        if self.is_whole:
            return f"{saved}; nothing was lost"
        lines, where = self.lines(), self.target / LOST_NAME
        more = [f"{len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
        title = f"{saved}. Lost rows have their first values. Lost or in doubt, all listed in {where}:"
        return "\n  ".join([title, *lines[:_SHOWN], *more])

    def lines(self) -> list[str]:
        lines = [*self.doubts]
        if self.payload_lost:
            lines.append(f"extra and tensors of version {self.version}, and how many updates each table has had")
        if self.missing > 0:
            words = "of which not all rows are known; rows that may be newer there are lost, or taken with --stale-ok"
            lines.append(f"{format_count(self.missing, 'segment')} {words}")
        if self.unproven:
            lines.append(f"{format_count(self.unproven, 'row')} saved that may be older than version {self.version}")
        return lines + [f"table {excerpt(loss.table)}: rows {loss.first} to {loss.last}" for loss in self.lost]


def salvage(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], *, stale_ok: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SalvageReport:  # fmt: skip
    """Save every sound row of a store's last version, its extra and its tensors into a new store. Memory: 8 bytes a
    row, and some 200 a segment.

    Args:
        directory: the damaged store; only read, and no process may have it open for writing.
        target: the new store's directory; must not exist, or be empty.
        stale_ok: also take rows that may be older than the version, or gone back from, where nothing newer was found.
        progress: called as ``progress(done_bytes, total_bytes)``, of the copy and then of its verification.

    Raises:
        ValueError: the target is inside the store. FileExistsError: it holds something.
        FileNotFoundError: there is no directory to make it in. TierstoreError: the system refuses to write there.
        StoreNotFoundError, DamagedError: manifest or row file is missing, or nothing says which version is last.
        FormatError: the store is of an older release, or the manifest of other tables. StoreLockedError. DiskFullError.
        TableError: ``stale_ok``, and a table has dynamic ids, which older rows may not be of.
    """
    source, target = Path(directory).absolute(), Path(target).absolute()
    report = SalvageReport(directory=source, target=target)
    with contextlib.ExitStack() as stack:
        require_plain_files(source)
        if not (path := source / ROW_FILE_NAME).exists():
            raise StoreNotFoundError(f"{path}: no such file; there are no rows to save")
        stack.enter_context(contextlib.closing(locks := FileLocks(path)))
        locks.lock_for_writer(shared=True)  # no writer opens the source meanwhile
        require_outside(target, source)
        work = stack.enter_context(new_store(target, WORK_NAME, (ROW_FILE_NAME, LOST_NAME, MANIFEST_NAME)))
        known = _manifest(source)
        for config in known.tables if stale_ok else ():
            config.require_fixed_ids("repair with stale_ok=True, --stale-ok,")
        made = replace(known, store_id=uuid.uuid4().hex, has_rows=True)
        _save(path, known, work, made, report, stale_ok, progress or (lambda *_: None))
        (work / LOST_NAME).write_text("".join(f"{line}\n" for line in report.lines()), encoding="utf-8")
        made.write(work)
        verify_copy(work, progress)
    return report


def _manifest(source: Path) -> Manifest:
    try:
        return Manifest.read(source)
    except (StoreNotFoundError, ChecksumError, TruncatedError) as error:
        raise type(error)(
            f"{error}. Without a manifest nothing says which tables there are: put a copy of it in its place; one of "
            "the same store from before its last tables were made will do for the others"
        ) from error


def _save(
    path: Path, known: Manifest, work: Path, made: Manifest, report: SalvageReport, stale_ok: bool,
    progress: Callable[[int, int], None],
) -> None:  # fmt: skip
    size, page_bytes = path.stat().st_size, known.page_bytes
    if size < 2 * page_bytes:
        raise DamagedError(f"{path}: {size} bytes are less than its two meta pages; there is nothing to save")
    rows = RowMap(known.shapes)
    with contextlib.ExitStack() as stack:
        stack.callback((file_map := FileMap(path, size)).close)
        remains = choose_tree(path, file_map, page_bytes, bytes.fromhex(known.store_id), report.doubts)
        stored = remains.store_id or read_stamp(path, page_bytes)
        if stored != bytes.fromhex(known.store_id) and any(stored):
            raise FormatError(
                f"{path}: belongs to store {stored.hex()}, not to {known.store_id}, which {MANIFEST_NAME} is of: put a "
                "copy of the store's own in its place"
            )
        report.version = remains.version
        tier = stack.enter_context(new_tier(work, made))
        if report.version:
            survivors = surviving_rows(remains, rows)
            report.missing = survivors.missing
            total, done = sum(int(runs["rows"].sum()) for runs in survivors.runs), 0
            for segments, runs in zip(rows.segments.values(), survivors.runs, strict=True):
                for count in _take(file_map, tier, rows, segments, runs, stale_ok, report):
                    progress(size * (done := done + count) // total, size)
            for index, each in enumerate(known.tables):
                name = f"of ids of {known.tables[index - 1].name}" if each.is_table_of_ids else each.name
                report.lost += _losses(rows, index, name)
            for index, each in enumerate(known.tables[1:] if report.lost or report.missing else ()):
                if each.is_table_of_ids:
                    _drop_ids(tier, index, known.tables[index], report.version)
            tier.commit(_payload(known, remains, report), report.version)
        progress(size, size)


def _drop_ids(tier: LmdbColdTier, index: int, config: TableConfig, epoch: int) -> None:
    """Take the ids from rows of a table that were not saved: these would have first values that are not their ids'."""
    saved, ids = (np.concatenate([np.empty(0, np.int64), *tier.stored_rows(place)]) for place in (index, index + 1))
    own, rows = TableOfIds(config).own_rows(ids)
    lost = ids[own][~np.isin(rows, saved)]
    slots, words = np.arange(len(lost), dtype=np.int32), np.zeros((len(lost), 2), np.uint64)
    tier.write(lost | ((index + 1) << KEY_ROW_BITS), slots, words, words[:, :0], epoch=epoch)


def _payload(known: Manifest, remains: Remains, report: SalvageReport) -> bytes:
    """The version's, or an empty one; as a commit of the new store it is made from no other."""
    if (payload := remains.payload) is not None:
        with contextlib.suppress(DamagedError):
            version = unpack(report.version, payload)
            tables = dict(list(version.tables.items())[: len(known.tables)])
            return repack(version._replace(tables=tables), NO_LINEAGE.following(0))
    report.payload_lost = True
    states = {config.name: TableState(0, config.optimizer.lr) for config in known.tables}
    return pack(states, {}, {}, NO_LINEAGE.following(0))


def _take(
    file_map: FileMap, tier: LmdbColdTier, rows: RowMap, segments: Segments, runs: Runs, stale_ok: bool,
    report: SalvageReport,
) -> Iterator[int]:  # fmt: skip
    """Copy the sound rows of one layout, some runs at a time, and note in ``rows`` which; gives how many were seen."""
    layout, geo, stops, start = segments.layout, segments.geo, np.cumsum(runs["rows"]), 0
    most, page_bytes = max(geo.rows_per_segment, _BATCH_BYTES // layout.row_bytes), 8 * geo.page_words
    keys, trust, taken = np.empty(most, np.int64), np.empty(most, np.uint8), np.empty(most, np.int32)
    weights, state = (np.empty((most, words), np.uint64) for words in (layout.weight_words, layout.state_words))
    while start < len(stops):
        before = int(stops[start] - runs["rows"][start])
        part = slice(start, int(np.searchsorted(stops, before + most, "right")))
        start, own = part.stop, runs[part]
        firsts = np.where(own["index_page"] > 0, own["index_page"], own["data_page"])
        ends = own["data_page"] + -(-own["rows"] // geo.rows_per_block) * geo.pages_per_block
        queue_parts(file_map.address, firsts * page_bytes, ends * page_bytes)
        limit, flat = file_map.file_bytes() // page_bytes, (weights.reshape(-1), state.reshape(-1))
        count = settled(file_map, partial(read_rows, geo, file_map.words, limit, own, keys, trust, *flat))
        num_taken, unproven = choose_rows(geo.layout_id, rows.tables, rows.places, keys[:count], trust, stale_ok, taken)
        if num_taken:
            slots = taken[:num_taken]
            tier.write(keys[slots], slots, weights, state, epoch=report.version)
        report.rows += num_taken
        report.unproven += unproven
        yield count


def _losses(rows: RowMap, table: int, name: str) -> Iterator[Loss]:
    """What was lost of a table, neighbouring rows together."""
    base, count = int(rows.tables.bases[table]), int(rows.tables.num_rows[table])
    lost = np.flatnonzero(rows.places[base : base + count] == LOST)
    firsts, lasts = lost[np.diff(lost, prepend=-2) != 1].tolist(), lost[np.diff(lost, append=-1) != 1].tolist()
    yield from map(partial(Loss, name), firsts, lasts)
