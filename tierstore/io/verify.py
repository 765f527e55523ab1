"""Reading and checking every stored block, at the rate at which the device reads its files from end to end."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DamagedError, TruncatedError, UnreadableError
from ..rows import KEY_ROW_BITS, MAX_ROWS, RowLayout
from .base import VerifyReport
from .blocks import BlockStatus
from .census import check_placement
from .directory import Directory
from .files import RESTORE
from .gather import Geometry
from .placement import Placement
from .scrub import (
    Found,
    PageRange,
    TableShapes,
    check_range,
    new_found,
    new_range,
    place_blocks,
    queue_range,
    table_shapes,
)
from .snapshot import Snapshot

__all__ = ["Findings", "Place", "block_error", "find_damage", "verify_blocks"]

RANGE_PAGES: Final = 1 << 22
"""Pages whose blocks are entered at a time: 64 MiB of memory, and a walk of the index for every 16 GiB of a file."""
_SLICE_PAGES: Final = 2048
_SLICES_AHEAD: Final = 4
"""Slices of 8 MiB queued for reading while one is checked."""
_KINDS: Final = {BlockStatus.OUT_OF_FILE: TruncatedError, BlockStatus.UNREADABLE: UnreadableError}
_LISTED: Final = 10_000
_NAMED: Final = 8


class Place(NamedTuple):
    """Something that is damaged."""

    table: int
    block: int
    row: int
    """-1 where it is the block."""
    status: BlockStatus

    def __str__(self) -> str:
        if self.status == BlockStatus.UNREADABLE:
            what = f"row {self.row}" if self.row >= 0 else f"block {self.block}"
            return f"{what} of table {self.table} cannot be read: the device refuses its page"
        if self.row >= 0:
            return f"row {self.row} of table {self.table} does not match its checksum"
        place = f"block {self.block} of table {self.table}"
        if self.status == BlockStatus.OUT_OF_FILE:
            return f"{place} lies beyond the end of the file"
        return f"{place} is damaged ({self.status.name})"


class Findings(NamedTuple):
    """What a check of everything found."""

    report: VerifyReport
    places: list[Place]
    """By table, block and row; at most 10,000."""
    num_places: int


def block_error(
    path: Path, block_key: int, geo: Geometry, result: NDArray[np.int64], placement: Placement | None = None
) -> DamagedError:
    """What a kernel of blocks.py found wrong: a BlockStatus in ``result[0]``, the row's place in ``result[2]``."""
    row = int(result[2]) if result[0] == BlockStatus.BAD_ROW else -1
    return _error(path, [_named(_place(block_key, geo.rows_per_block, int(result[0]), row), placement)], 1)


def _named(place: Place, placement: Placement | None) -> Place:
    """The place, with the row that lies there."""
    if placement is None or place.row < 0:
        return place
    key = placement.row_at((place.table << KEY_ROW_BITS) + place.row)
    return place._replace(table=key >> KEY_ROW_BITS, row=key % MAX_ROWS)


def _place(block_key: int, rows_per_block: int, status: int, row: int) -> Place:
    table, block = block_key >> KEY_ROW_BITS, block_key % MAX_ROWS
    return Place(table, block, block * rows_per_block + row if row >= 0 else -1, BlockStatus(status))


def _error(path: Path, places: list[Place], num_places: int) -> DamagedError:
    named = "; ".join(str(place) for place in places[:_NAMED])
    rest = f"; and {num_places - _NAMED:,} more places, {num_places:,} in all" if num_places > _NAMED else ""
    kind = _KINDS.get(places[0].status, ChecksumError)
    return kind(f"{path}: {named}{rest}. {RESTORE}")


def verify_blocks(
    snapshot: Snapshot,
    directory: Directory,
    geometries: Mapping[RowLayout, Geometry],
    epoch_limit: int,
    progress: Callable[[int, int], None] | None,
    placement: Placement | None,
) -> VerifyReport:
    """Check each block of known tables with an epoch up to ``epoch_limit``; see ``ColdTier.verify``.

    Raises:
        DamagedError: when all was read; names the first places and says how many there are.
    """
    snapshot.check_free_pages()
    check_placement(snapshot)
    found = find_damage(snapshot, directory, geometries, epoch_limit, progress)
    if found.num_places:
        raise _error(snapshot.path, [_named(place, placement) for place in found.places[:_NAMED]], found.num_places)
    return found.report


def find_damage(
    snapshot: Snapshot,
    directory: Directory,
    geometries: Mapping[RowLayout, Geometry],
    epoch_limit: int,
    progress: Callable[[int, int], None] | None,
) -> Findings:
    """Check as ``verify_blocks`` does and say where the damage is.

    ``progress(done_bytes, total_bytes)`` counts the bytes of the file that were passed.

    Raises:
        DamagedError: the index names what cannot be a block.
    """
    tables = directory.tables
    shapes = table_shapes(
        {table: (geometries[layout], int(tables.num_blocks[table])) for table, layout in directory.layouts.items()}
    )
    found = new_found(shapes)
    totals = np.zeros(3, np.int64)
    places: list[Place] = []
    num_places = 0
    end = snapshot.limit_pages()
    for pages in _ranges(snapshot, shapes, epoch_limit, end):
        for start in _read_ahead(snapshot, shapes, pages):
            for result in _check_slice(snapshot, shapes, pages, start, found):
                totals += result[2:]
                num_places += int(result[1])
                if result[1] and len(places) < _LISTED:
                    places += _places(shapes, found, int(result[1]))
            if progress is not None:
                done = min(pages.first_page + start + _SLICE_PAGES, end)
                progress(done * snapshot.page_bytes, end * snapshot.page_bytes)
    rows, blocks, num_pages = totals.tolist()
    report = VerifyReport(
        tables=int(shapes.has_blocks.sum()), blocks=blocks, rows=rows, bytes=num_pages * snapshot.page_bytes
    )
    return Findings(report, sorted(places)[:_LISTED], num_places)


def _ranges(snapshot: Snapshot, shapes: TableShapes, epoch_limit: int, end: int) -> Iterator[PageRange]:
    """All blocks by page, a range of pages at a time; a range is valid until the next is asked for."""
    for first_page in range(0, end, RANGE_PAGES):
        pages = new_range(first_page, min(RANGE_PAGES, end - first_page))
        for entries, count in snapshot.walk():
            bad = place_blocks(entries, count, epoch_limit, snapshot.page_bytes, shapes, pages)
            if bad >= 0:
                key = int(entries.block_keys[bad])
                raise DamagedError(
                    f"{snapshot.path}: the index has block {key % MAX_ROWS} of table {key // MAX_ROWS}, of "
                    f"{entries.sizes[bad]} bytes, which cannot be. {RESTORE}"
                )
        yield pages


def _read_ahead(snapshot: Snapshot, shapes: TableShapes, pages: PageRange) -> Iterator[int]:
    """The starts of the range's slices, in order, the slices that follow being read meanwhile.

    In a thread of its own: the system takes about as long to queue pages as we take to check them.
    """

    def queue(start: int) -> None:
        address = snapshot.file_map.rows.address
        queue_range(address, snapshot.page_bytes, shapes, pages, start, start + _SLICE_PAGES)

    starts = range(0, len(pages.block_keys), _SLICE_PAGES)
    if len(starts) == 1:
        queue(0)
        yield 0
        return
    with ThreadPoolExecutor(1, "tierstore-verify") as executor:
        queued = deque(executor.submit(queue, start) for start in starts[:_SLICES_AHEAD])
        try:
            for number, start in enumerate(starts):
                queued.extend(executor.submit(queue, later) for later in starts[number + _SLICES_AHEAD :][:1])
                queued.popleft().result()
                yield start
        finally:
            executor.shutdown(cancel_futures=True)


def _check_slice(
    snapshot: Snapshot, shapes: TableShapes, pages: PageRange, start: int, found: Found
) -> Iterator[NDArray[np.int64]]:
    """Check one slice; yields the kernel's result as often as ``found`` fills up, and at the end."""
    stop = min(start + _SLICE_PAGES, len(pages.block_keys))
    limit = snapshot.limit_pages()
    while start < stop:
        result = np.zeros(5, np.int64)
        words, guard = snapshot.file_map.rows.words, snapshot.file_map.rows.guard
        since = guard.begin()
        check_range(words, snapshot.page_bytes // 8, limit, shapes, pages, start, stop, found, result)
        if not guard.is_clean(since):
            _mark_refused(snapshot, since, shapes, pages, found, int(result[1]))
        yield result
        start = int(result[0])


def _mark_refused(
    snapshot: Snapshot, since: int, shapes: TableShapes, pages: PageRange, found: Found, count: int
) -> None:
    """Say of the first ``count`` places found which are of blocks that could not be read."""
    at = np.flatnonzero(np.isin(pages.block_keys, found.block_keys[:count]))
    keys = pages.block_keys[at]
    starts = (pages.first_page + at) * snapshot.page_bytes
    stops = starts + shapes.pages_per_block[(keys >> np.uint64(KEY_ROW_BITS)).astype(np.int64)] * snapshot.page_bytes
    refused = snapshot.file_map.rows.guard.refused(since)
    is_cut = snapshot.file_map.rows.guard.is_cut_short(refused)
    marked = np.isin(found.block_keys[:count], keys[refused.meet(starts, stops)])
    found.statuses[:count][marked] = BlockStatus.OUT_OF_FILE if is_cut else BlockStatus.UNREADABLE


def _places(shapes: TableShapes, found: Found, count: int) -> Iterator[Place]:
    for block_key, status, row in zip(*(column[:count].tolist() for column in found), strict=True):
        yield _place(block_key, int(shapes.rows_per_block[block_key >> KEY_ROW_BITS]), status, row)
