"""A backup: a copy of a store from one snapshot of it, made while others train on the store and commit."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import DamagedError
from ..io import LmdbColdTier, VerifyReport
from ..io.files import copied_bytes, copy_rows_file, rows_path
from ..io.records import read_head
from ..io.snapshot import Snapshot
from ..system.output import require_room
from ..system.signals import shielded
from .manifest import Manifest
from .opened import open_files
from .target import Steps, new_store, require_outside

WORK_NAME: Final = "backup.partial"
"""Where in the target a backup is made; what is in it may be deleted."""


class BackupReport(NamedTuple):
    """What was copied, to the directory ``target``."""

    target: Path
    version: int
    """The last commit in it; 0 if there is none."""
    versions: tuple[int, ...]
    """All that it keeps, ascending."""
    size_bytes: int
    """Length of its row file."""
    verified: VerifyReport | None
    """What was checked, with ``verify=True``."""


def back_up(
    tier: LmdbColdTier,
    directory: Path,
    target: str | os.PathLike[str],
    *,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:
    """Copy a store as it is on SSD, with all versions that it keeps, into another directory.

    Any thread may call it while others train and commit. Rows that were not committed are not in the backup: commit
    first. A store open for reading is copied as it was when it was opened or last refreshed: ``Store.refresh`` first.
    The backup is the same store at an earlier time, with the same identity. It may be opened, trained on, or put in the
    store's place. It is synced, and its files were opened once.

    Meanwhile the writer reuses no page of what is copied: the store's file grows by what is written, room that later
    commits use. ``Store.close`` waits for the copy.

    Args:
        target: must not exist, or be empty, or hold only what an interrupted backup left.
        verify: also read the backup and check every row.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises:
        ClosedError. ValueError: the target is inside the store's directory. FileExistsError: it holds something.
        FileNotFoundError: there is no directory to make it in. DiskFullError: no free space for it.
        StoreReplacedError: the store was moved. DamagedError: it is not sound.
        TierstoreError: the system refused, or another process writes the target.
        Whatever is raised, nothing is left of the backup.
    """
    source, target = directory.resolve(), Path(target).resolve()
    require_outside(target, source)
    with contextlib.ExitStack() as stack:
        snapshot = shielded(stack.enter_context)(tier.lease_tree())
        work = stack.enter_context(new_store(target, WORK_NAME))
        steps = Steps(progress)
        path = rows_path(work)
        require_room(path, copied_bytes(snapshot))
        copy_rows_file(snapshot, path, steps.copied if verify else progress or steps.copied)
        # Read after the snapshot was taken: a writer makes a table before it commits rows of it.
        Manifest.read(source).write(work)
        version, verified = _check(work, snapshot, steps if verify else None)
        size_bytes = path.stat().st_size
    return BackupReport(target, version[-1] if version else 0, version, size_bytes, verified)


def _check(work: Path, snapshot: Snapshot, steps: Steps | None) -> tuple[tuple[int, ...], VerifyReport | None]:
    """Open the backup, which walks its trees: it must be a store with the snapshot's versions, which it returns.

    The source's are not walked before: out of the system's cache, that takes a fifth of the time of the copy.
    """
    try:
        manifest, cold, _ = open_files(work, readonly=True)
        with contextlib.closing(cold):
            kept = read_head(snapshot).kept
            if cold.versions != kept:
                raise DamagedError(f"{work} keeps versions {cold.versions}, not {kept}")
            manifest.add_tables(cold)
            return kept, None if steps is None else cold.verify(steps.verified)
    except DamagedError as error:
        raise DamagedError(
            f"the backup is not sound, most likely because the store is not: check it with tierstore verify ({error})"
        ) from error
