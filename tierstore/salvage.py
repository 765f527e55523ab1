"""What is sound of a damaged store, saved into a new one, and a list of what was lost.

The source is only read. Rows are those of its last version, each held against its own checksum; io/survivors.py tells
which blocks are certain to be of that version. The new store keeps the version's number. A row that was lost has its
first value there, as if it had never been written.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import TableConfig
from .durable import flocked
from .errors import DamagedError, FormatError, StoreLockedError, StoreNotFoundError
from .excerpt import excerpt
from .io import ROW_FILE_NAME, LmdbColdTier
from .io.anchor import ANCHOR_NAME, read_stamp
from .io.census import num_places
from .io.files import require_plain_files
from .io.gather import Geometry, geometry
from .io.mapped import FileMap
from .io.placement import Placement
from .io.remains import Remains, read_remains
from .io.scrub import TableShapes, table_shapes
from .io.survivors import Survivors, choose_tree, list_entries, surviving_blocks
from .io.wreck import take_rows
from .io.writer_lock import LOCK_NAME
from .lineage import NO_LINEAGE
from .manifest import Manifest
from .opening import open_store
from .plainfile import read_plain_file
from .rows import KEY_ROW_BITS, MAX_ROWS
from .target import new_store, require_outside
from .version import TableState, pack, repack, unpack

__all__ = ["LOST_NAME", "WORK_NAME", "Loss", "SalvageReport", "salvage"]

LOST_NAME: Final = "lost.txt"
"""In the new store: what was lost, a line each."""
WORK_NAME: Final = "repair.partial"
"""Where in the target the store is made; what is in it may be deleted."""
_STAGING_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 8 << 20
_MAX_MANIFEST_BYTES: Final = 64 * 2**20
_DDR: Final = "64MiB"
_SHOWN: Final = 20


class Loss(NamedTuple):
    """Rows ``first`` to ``last`` of a table were lost. Of a lost block, rows that were never written are among them."""

    table: str
    first: int
    last: int


@dataclass(kw_only=True)
class SalvageReport:
    """What was saved, and what was not.

    Attributes:
        version: whose rows, extra and tensors these are; the new store has the same number.
        rows: saved.
        lost: what was lost of each table, in order.
        missing: by table, blocks that the version had and of which nothing at all was found: which rows they held is
            not known. -1 where their number is not known either.
        unproven: blocks taken, with ``stale_ok``, that may be older than the version.
        payload_lost: extra, tensors and the tables' steps are gone.
        doubts: what could not be proven, in sentences.
    """

    directory: Path
    target: Path
    version: int = 0
    rows: int = 0
    lost: list[Loss] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    unproven: int = 0
    payload_lost: bool = False
    doubts: list[str] = field(default_factory=list)

    @property
    def lost_rows(self) -> int:
        return sum(loss.last - loss.first + 1 for loss in self.lost)

    @property
    def is_whole(self) -> bool:
        """Whether all of the version was saved, for certain."""
        return not (self.lost or self.missing or self.unproven or self.payload_lost or self.doubts)

    def describe(self) -> str:
        """What came of it, in words; not all lines of very many."""
        saved = f"{self.target}: version {self.version}, {self.rows:,} rows saved and verified"
        if self.is_whole:
            return f"{saved}; nothing was lost"
        lines = self.lines()
        more = [f"  {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
        title = (
            f"{saved}. Lost rows have their first values. Lost or in doubt, all listed in {self.target / LOST_NAME}:"
        )
        return "\n".join([title, *(f"  {line}" for line in lines[:_SHOWN]), *more])

    def lines(self) -> list[str]:
        """What was lost, a line each."""
        lines = [*self.doubts]
        if self.payload_lost:
            lines.append(f"extra and tensors of version {self.version}, and how many updates each table has had")
        for table, count in self.missing.items():
            blocks = "an unknown number of blocks" if count < 0 else f"{count} blocks"
            lines.append(f"table {excerpt(table)}: {blocks} more, of rows that are not known")
        if self.unproven:
            lines.append(f"{self.unproven} blocks were saved that may be older than version {self.version}")
        return lines + [f"table {excerpt(loss.table)}: rows {loss.first} to {loss.last}" for loss in self.lost]


def salvage(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    manifest: str | os.PathLike[str] | None = None,
    stale_ok: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SalvageReport:
    """Save every sound row of a store's last version, its extra and its tensors into a new store.

    Takes 32 bytes of memory a block, and more where the index is damaged.

    Args:
        directory: the damaged store; only read, and no process may have it open for writing.
        target: the new store's directory; must not exist, or be empty.
        manifest: a copy of the store's manifest.json, where its own cannot be read.
        stale_ok: also take blocks that may be older than the version, where nothing newer was found.
        progress: called as ``progress(done_blocks, total_blocks)``.

    Raises:
        ValueError: the target is inside the store. FileExistsError: it holds something.
        FileNotFoundError: there is no directory to make it in. TierstoreError: the system refuses to write there.
        StoreNotFoundError, DamagedError: the manifest or the row file is missing, or nothing leads to any row.
        StoreLockedError: the store is open for writing. DiskFullError: no room for the new store.
    """
    source, target = Path(directory).absolute(), Path(target).absolute()
    report = SalvageReport(directory=source, target=target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_not_written(source))
        require_outside(target, source)
        work = stack.enter_context(new_store(target, WORK_NAME, (ROW_FILE_NAME, ANCHOR_NAME, LOST_NAME)))
        known = _manifest(source, manifest)
        made = replace(known, store_id=uuid.uuid4().hex, has_rows=True, is_placed=False)
        _save(source / ROW_FILE_NAME, known, work, made, report, stale_ok, progress)
        (work / LOST_NAME).write_text("".join(f"{line}\n" for line in report.lines()))
        made.write(work)
        with open_store(work, mode="r", ddr=_DDR) as store:
            store.verify()
    return report


@contextlib.contextmanager
def _not_written(source: Path) -> Iterator[None]:
    """Hold the source's lock, shared, so that no writer opens it meanwhile."""
    require_plain_files(source)
    if not (source / ROW_FILE_NAME).exists():
        raise StoreNotFoundError(f"{source / ROW_FILE_NAME}: no such file; there are no rows to save")
    try:
        descriptor = os.open(source / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    refusal = StoreLockedError(f"{source}: a process has the store open for writing; end it first")
    try:
        with flocked(descriptor, fcntl.LOCK_SH, refusal):
            yield
    finally:
        os.close(descriptor)


def _manifest(source: Path, other: "str | os.PathLike[str] | None") -> Manifest:
    if other is not None:
        return Manifest._parse(Path(other), read_plain_file(Path(other), _MAX_MANIFEST_BYTES))
    try:
        return Manifest.read(source)
    except (StoreNotFoundError, DamagedError) as error:
        raise type(error)(
            f"{error}. Without a manifest nothing says which tables there are: give a copy of it with --manifest FILE; "
            "one of the same store from before its last tables were made will do for the others"
        ) from error


def _save(
    path: Path,
    known: Manifest,
    work: Path,
    made: Manifest,
    report: SalvageReport,
    stale_ok: bool,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Make the new store's row file."""
    size = path.stat().st_size
    if size < 2 * known.page_bytes:
        raise DamagedError(f"{path}: {size} bytes are less than its two meta pages; there is nothing to save")
    file_map = FileMap(path, size)
    try:
        store_id = bytes.fromhex(known.store_id)
        meta = choose_tree(path, file_map, known.page_bytes, store_id, report.doubts)
        listed = list_entries(file_map, meta)
        remains = read_remains(path, file_map, known.page_bytes, listed, known.is_placed, report.doubts)
        _require_same_store(path, known, remains)
        report.version = remains.record.version
        shapes, geometries = _shapes(path, known, remains.placement)
        survivors = surviving_blocks(file_map, meta, listed, remains.record, shapes)
        tier = LmdbColdTier(work, store_id=bytes.fromhex(made.store_id), readonly=False, staging_bytes=_STAGING_BYTES)
        try:
            total = sum(len(s.pages) for s in survivors.values())
            taker = _Taker(file_map, tier, remains.placement, report, stale_ok, progress, total)
            for index, config in enumerate(known.tables):
                tier.add_table(index, config.layout(known.page_bytes), config.num_embeddings)
            for index, config in enumerate(known.tables if report.version else ()):
                places = num_places(
                    path, remains.placement, index, config.layout(known.page_bytes), config.num_embeddings
                )
                taker.take(config, geometries[index], survivors[index], places, remains.has_totals)
            if report.version:
                report.lost = list(taker.losses(known.tables))
                tier.commit(_payload(known, remains, report), report.version)
        finally:
            tier.close()
    finally:
        file_map.close()


def _require_same_store(path: Path, known: Manifest, remains: Remains) -> None:
    stored = remains.store_id or read_stamp(path, known.page_bytes)
    if stored != bytes.fromhex(known.store_id) and any(stored):
        raise FormatError(
            f"{path}: belongs to store {stored.hex()}, not to {known.store_id}, which the manifest is of: give the "
            "store's own with --manifest FILE"
        )


def _shapes(path: Path, known: Manifest, placement: Placement | None) -> tuple[TableShapes, list[Geometry]]:
    layouts = [config.layout(known.page_bytes) for config in known.tables]
    geometries = [geometry(layout, 0) for layout in layouts]
    blocks = [
        layout.num_blocks(num_places(path, placement, index, layout, config.num_embeddings))
        for index, (layout, config) in enumerate(zip(layouts, known.tables, strict=True))
    ]
    return table_shapes(dict(enumerate(zip(geometries, blocks, strict=True)))), geometries


def _payload(known: Manifest, remains: Remains, report: SalvageReport) -> bytes:
    """The version's payload, or an empty one for its tables. As a commit of the new store it is made from no other."""
    if remains.payload is not None:
        with contextlib.suppress(DamagedError):
            return repack(unpack(report.version, remains.payload), NO_LINEAGE.following(0))
    report.payload_lost = True
    return pack(
        {config.name: TableState(0, config.optimizer.lr) for config in known.tables}, {}, {}, NO_LINEAGE.following(0)
    )


class _Taker:
    """Copies sound rows, table by table, and notes what is lost."""

    def __init__(
        self,
        file_map: FileMap,
        tier: LmdbColdTier,
        placement: Placement | None,
        report: SalvageReport,
        stale_ok: bool,
        progress: Callable[[int, int], None] | None,
        total: int,
    ) -> None:
        self._file_map = file_map
        self._tier = tier
        self._placement = placement
        self._lost: list[NDArray[np.int64]] = []
        self._report = report
        self._stale_ok = stale_ok
        self._progress = progress
        self._done, self._total = 0, total

    def take(self, config: TableConfig, geo: Geometry, blocks: Survivors, num_places: int, has_totals: bool) -> None:
        """Save the rows in the blocks of one table."""
        taken = np.ones(len(blocks.pages), np.bool_) if self._stale_ok else blocks.proven
        self._report.unproven += int((taken & ~blocks.proven).sum())
        if not taken.all():
            keys = blocks.block_keys[~taken].astype(np.int64)
            firsts = (keys & -MAX_ROWS) + (keys & (MAX_ROWS - 1)) * geo.rows_per_block
            self._lost.append(self._rows_at((firsts[:, None] + np.arange(geo.rows_per_block)).ravel()))
        if blocks.missing or not has_totals:
            self._report.missing[config.name] = blocks.missing if has_totals else -1
        self._copy(geo, num_places, blocks.block_keys[taken], blocks.pages[taken])

    def losses(self, configs: Sequence[TableConfig]) -> Iterator[Loss]:
        """What was lost of each table, in order."""
        keys = np.unique(np.concatenate([np.empty(0, np.int64), *self._lost]))
        for index, config in enumerate(configs):
            rows = keys[keys >> KEY_ROW_BITS == index] & (MAX_ROWS - 1)
            yield from _ranges(config.name, rows[rows < config.num_embeddings])

    def _rows_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places if self._placement is None else self._placement.rows_at(places)

    def _copy(self, geo: Geometry, num_places: int, block_keys: NDArray[np.uint64], pages: NDArray[np.int64]) -> None:
        """Write the sound rows of these blocks to the new store, and note the others."""
        row_bytes = 8 * geo.row_words
        room = max(geo.rows_per_block, min(_BATCH_BYTES // row_bytes, geo.rows_per_block * max(1, len(pages))))
        keys, lost = np.empty((2, room), np.int64)
        weights, state = np.empty((room, geo.weight_words), np.uint64), np.empty((room, geo.state_words), np.uint64)
        limit = self._file_map.file_bytes() // (8 * geo.page_words)
        slots = np.arange(room, dtype=np.int32)
        start = 0
        while start < len(pages):
            result = np.zeros(3, np.int64)
            words, guard, refused = self._file_map.words, self._file_map.guard, -1
            while not guard.is_clean(refused):  # a page that was refused shows zeros from then on, so it is lost
                refused = guard.met
                take_rows(geo, words, limit, num_places, block_keys, pages, start, keys, weights, state, lost, result)
            stop, count, num_lost = result.tolist()
            if count:
                rows = self._rows_at(keys[:count])
                if len(rows) < count:
                    raise DamagedError("rows lie where none can be: is the manifest another store's?")
                self._tier.write(rows, slots[:count], weights, state, epoch=self._report.version)
            self._report.rows += count
            self._lost.append(self._rows_at(lost[:num_lost]))
            self._done += stop - start
            start = stop
            if self._progress is not None:
                self._progress(self._done, self._total)


def _ranges(table: str, rows: NDArray[np.int64]) -> Iterator[Loss]:
    """Neighbouring rows together."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        if len(run):
            yield Loss(table, int(run[0]), int(run[-1]))
