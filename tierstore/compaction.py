"""A copy of a store in which blocks lie in key order and no page is free.

LMDB itself walks a snapshot of the tree and writes its pages anew, one after another, into a pipe; this end of it puts
them into a file, so that progress shows, Ctrl-C is heeded and a full disk is told from damage. LMDB believes what it
walks, so the tree and the header of every page run it will copy are checked first.

The copy is made and verified in a directory of its own within the target and moved into its place at the end.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import numpy as np

from .errors import DamagedError, TierstoreError, TruncatedError
from .exchange.output import require_room
from .io.anchor import ANCHOR_NAME, require_sound, stamp_rows_file
from .io.blocks import BlockStatus, check_page_headers
from .io.census import check_store, read_head, read_placement
from .io.files import RESTORE, check_rows_file, map_bytes, open_environment, rows_path, translate
from .io.mapped import FileMap
from .io.snapshot import Snapshot
from .io.versions import garbage, stale_items
from .manifest import Manifest
from .opening import open_store
from .placing import plan_placement, write_placed
from .signals import Shield
from .target import Steps, new_store, require_outside
from .trace import Trace, read_trace

__all__ = ["WORK_NAME", "CompactReport", "compact_store"]

WORK_NAME: Final = "compact.partial"
"""Where in the target a copy is made; what is in it may be deleted."""
_PIPE_BYTES: Final = 1 << 20
_META_PAGES: Final = 2
_ATTEMPTS: Final = 100
_DDR: Final = "64MiB"


class CompactReport(NamedTuple):
    """What was copied.

    Attributes:
        bytes_before, bytes_after: of the two row files, as they take room on the device.
    """

    target: Path
    version: int
    blocks: int
    rows: int
    bytes_before: int
    bytes_after: int


def compact_store(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    trace: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CompactReport:
    """Copy a store, all versions that it keeps, without free pages and with blocks in key order; then verify the copy.

    With a trace, rows that it has read often and together lie side by side in the copy, whatever table they are of, so
    that one page brings in several of a batch's. Rows that are not in the trace lie where they did in a plain copy. The
    copy keeps to this order, and plain copies of it do.

    The source is opened read-only and may be trained on meanwhile; what it has not committed is not in the copy. The
    copy is a store of the same identity, to put in the source's place.

    Args:
        directory: the source.
        target: the copy's directory; must not exist, or be empty, or hold what a copy that was cut short left.
        trace: a file as trace.py describes it, of tables of the store.
        progress: called as ``progress(done_bytes, total_bytes)`` while pages are copied.

    Raises:
        ValueError: the trace is none, or of other tables or rows than the store has; the target is inside the store.
        FileExistsError: the target holds something. FileNotFoundError: there is no directory to make it in.
        DiskFullError: no room for the copy. TierstoreError: the system refuses to write there.
        StoreNotFoundError, DamagedError: the source is none, or not sound; nothing is left of the copy.
    """
    source, target = Path(directory).absolute(), Path(target).absolute()
    Manifest.read(source)
    require_outside(target, source)
    lookups = None if trace is None else read_trace(trace)
    with new_store(target, WORK_NAME) as work:
        report = _make(source, work, lookups, progress)
    return report._replace(target=target)


def _make(source: Path, work: Path, trace: Trace | None, progress: Callable[[int, int], None] | None) -> CompactReport:
    """Make the copy in its working directory and verify it."""
    steps = Steps(progress)
    if trace is None:
        _copy_rows(source, rows_path(work), steps.copied)
        # Read after the rows: a writer makes a table before it commits rows of it.
        Manifest.read(source).write(work)
    else:
        _place_rows(source, work, trace, steps.copied)
    if trace is not None or _has_loose(work):
        _drop_loose(work)
        again = work / WORK_NAME
        again.mkdir()
        _copy_rows(work, rows_path(again), lambda _done, _total: None)
        os.replace(rows_path(again), rows_path(work))
    try:
        with open_store(work, mode="r", ddr=_DDR) as store:
            found = store.verify(progress=steps.verified)
            version = store.version
    except DamagedError as error:
        raise DamagedError(
            f"the copy of {source} is not sound, most likely because the source is not: check it with "
            f"tierstore verify {source} (the copy said: {error})"
        ) from error
    before, after = (path.stat().st_blocks * 512 for path in (rows_path(source), rows_path(work)))
    return CompactReport(work, version, found.blocks, found.rows, before, after)


def _place_rows(source: Path, work: Path, trace: Trace, progress: Callable[[int, int], None]) -> None:
    """Make a copy in which rows lie as the trace asks, and its manifest."""
    with _snapshot(source) as (_, snapshot, _):
        manifest = Manifest.read(source)
        placement = plan_placement(manifest.tables, manifest.page_bytes, trace)
        if placement is None:
            raise ValueError("the trace has no lookup; without --trace the copy has rows in order of their numbers")
        require_room(rows_path(work), snapshot.limit_pages() * snapshot.page_bytes)
        old = read_placement(snapshot, check_store(snapshot, bytes.fromhex(manifest.store_id)))
        write_placed(snapshot, manifest, old, placement, work, progress)
    replace(manifest, is_placed=True).write(work)


def _drop_loose(work: Path) -> None:
    """Drop what no version shows, as any open for writing does."""
    with open_store(work, mode="w", ddr=_DDR):
        pass
    (work / ANCHOR_NAME).unlink()


def _has_loose(work: Path) -> bool:
    """Whether there is anything that no version shows, such as what the source had not committed."""
    with _snapshot(work) as (_, snapshot, _):
        head = read_head(snapshot)
        return any(garbage(snapshot, head.current, head.oldest)) or bool(stale_items(snapshot, head))


@contextlib.contextmanager
def _snapshot(directory: Path) -> "Iterator[tuple[lmdb.Environment, Snapshot, lmdb.Transaction]]":
    """A snapshot of a row file whose trees LMDB may follow, and LMDB's own transaction on it.

    Raises:
        DamagedError: they are damaged. FormatError: the file is another store's.
    """
    path, store_id = rows_path(directory), bytes.fromhex(Manifest.read(directory).store_id)
    if not path.exists():
        raise TruncatedError(f"{path} is missing; restore it from a copy of the store")
    with contextlib.ExitStack() as stack:
        require_sound(path, store_id)
        page_bytes = check_rows_file(path).page_bytes
        file_map = stack.enter_context(contextlib.closing(FileMap(path, map_bytes(directory))))
        environment = open_environment(path, file_map.length_bytes, readonly=True)
        stack.callback(environment.close)
        for _ in range(_ATTEMPTS):  # a writer may commit between the two
            snapshot = Snapshot(path, file_map, page_bytes)
            stack.callback(snapshot.close)
            txn = environment.begin(write=False)
            stack.callback(txn.abort)
            if txn.id() == snapshot.txn_id:
                break
        else:
            raise TierstoreError(f"{path}: written to without a pause; try again")
        snapshot.check_free_pages()
        check_store(snapshot, store_id)
        yield environment, snapshot, txn


def _check_headers(snapshot: Snapshot) -> int:
    """Check the header of every run of pages outside the tree; returns how many pages these are."""
    total = 0
    page_bytes, result = snapshot.page_bytes, np.zeros(2, np.int64)
    for entries, count in snapshot.walk():
        outside = entries.pages[:count] != 0
        pages, sizes = entries.pages[:count][outside], entries.sizes[:count][outside]
        pages_each = (sizes + 16 + page_bytes - 1) // page_bytes
        words = snapshot.file_map.words
        with snapshot.file_map.guard.watching():
            check_page_headers(words, page_bytes // 8, snapshot.limit_pages(), pages, pages_each, result)
        if result[0] != BlockStatus.DONE:
            raise DamagedError(
                f"{snapshot.path}: page {pages[result[1]]} is damaged ({BlockStatus(int(result[0])).name}). {RESTORE}"
            )
        total += int(pages_each.sum())
    return total


def _copy_rows(source: Path, path: Path, progress: Callable[[int, int], None]) -> None:
    """Copy the newest tree of a row file into a new, synced file, stamped as its store's."""
    with _snapshot(source) as (environment, snapshot, txn):
        stat = txn.stat(environment.open_db(txn=txn, create=False))
        pages = _META_PAGES + stat["branch_pages"] + stat["leaf_pages"] + _check_headers(snapshot)
        total = pages * snapshot.page_bytes
        require_room(path, total)
        with contextlib.closing(_compacted(environment, txn, snapshot.path)) as parts, open(path, "xb") as file:
            for part in parts:
                file.write(part)
                progress(file.tell(), total)
        if path.stat().st_size != total:
            raise DamagedError(f"{snapshot.path}: LMDB copied {path.stat().st_size} bytes of {total}. {RESTORE}")
        stamp_rows_file(path, bytes.fromhex(Manifest.read(source).store_id), snapshot.page_bytes)


def _compacted(environment: "lmdb.Environment", txn: "lmdb.Transaction", path: Path) -> Generator[bytes, None, None]:
    """The bytes of the compacted file.

    LMDB writes in a thread; if this end is closed early, its next write fails, which ends it.
    """
    failures: list[Exception] = []
    read_end, write_end = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        try:
            environment.copyfd(write_end, compact=True, txn=txn)
        except Exception as error:
            failures.append(error)
        finally:
            os.close(write_end)

    thread = threading.Thread(target=work, name="tierstore-compact")
    thread.start()
    try:
        while part := os.read(read_end, _PIPE_BYTES):
            yield part
    finally:
        os.close(read_end)
        with Shield():  # the environment must outlive the thread
            thread.join()
    for error in failures:
        if isinstance(error, lmdb.Error):
            raise translate(error, path) from error
        raise error
