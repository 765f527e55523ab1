"""New stores, made whole or not at all; and backups, which are copied while others train and commit."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import DamagedError, TierstoreError
from ..io.base import VerifyReport
from ..io.files import FILE_NAMES, ROW_FILE_NAME, copied_bytes, copy_rows_file, rows_path
from ..io.lmdb import LmdbColdTier
from ..io.records import read_head
from ..io.snapshot import Snapshot
from ..system.files import names_in, output_errors, output_locked, require_parent, require_room, sync_directory
from ..system.killpoints import reach
from ..system.signals import shielded
from .directory import open_files
from .manifest import MANIFEST_NAME, Manifest, parts_in

BACKUP_WORK_NAME: Final = "backup.partial"  # where in the target a backup is made; what is in it may be deleted


def require_outside(target: Path, source: Path) -> None:
    """ValueError if the target is the store ``source``, or lies within it."""
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the store itself; choose another directory")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} is inside the store {source}; choose a directory outside")


@contextlib.contextmanager
def new_store(target: Path, work_name: str, names: Sequence[str] = (ROW_FILE_NAME, MANIFEST_NAME)) -> Iterator[Path]:
    """A directory to work in within the target. On leaving, its files move to the target; after an error nothing is
    left. The next call replaces what a killed process left.

    ``names`` are of the files or folders, synced, in the order in which they are moved. The last one makes the target
    whole: a store has no manifest before.

    Raises:
        FileExistsError: the target is a file, or holds something. FileNotFoundError: nor is there a directory for it.
        TierstoreError: the system refuses, or another process is at work there. DiskFullError: no free space.
    """
    work = target / work_name
    with output_errors(target):
        require_parent(target)
        is_made = not target.exists()
        if is_made:
            target.mkdir()
        elif not target.is_dir():
            raise FileExistsError(f"{target} is not a directory; choose another name")
        with output_locked(target, os.O_RDONLY | os.O_DIRECTORY):
            found = names_in(target)  # at most what a killed process leaves
            if found and not (work.is_dir() and found <= {work_name, *names[:-1]}):
                raise FileExistsError(
                    f"{target} is not empty (it holds {min(found - {work_name} or found)}); choose a directory that "
                    "is, or a new one"
                )
            try:
                _clear(target, work_name, names)
                work.mkdir()
                yield work
                for name in names[:-1]:
                    os.rename(work / name, target / name)
                sync_directory(target)
                reach("copy: rows in place")
                os.rename(work / names[-1], target / names[-1])
                sync_directory(target)
                sync_directory(target.parent)
                reach("copy: manifest in place")
                shutil.rmtree(work, ignore_errors=True)
                reach("copy: done")
            except BaseException:
                _clear(target, work_name, names)
                if is_made:
                    target.rmdir()
                raise


def _clear(target: Path, work_name: str, names: Sequence[str]) -> None:
    for path in (target / name for name in (*reversed(names), work_name)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def kept_if_committed(directory: Path) -> Iterator[None]:
    """If the block raises, and made a store in the directory that has no commit yet, the store is removed again."""
    is_made, is_new = not directory.exists(), not (directory / MANIFEST_NAME).exists() and not parts_in(directory)
    try:
        yield
    except BaseException:
        if is_new and (directory / MANIFEST_NAME).exists():
            with contextlib.suppress(TierstoreError, OSError), contextlib.ExitStack() as files:
                tier = files.enter_context(contextlib.closing(open_files(directory, readonly=False).cold))
                if not tier.last_version:
                    (directory / MANIFEST_NAME).unlink()
                    files.close()  # first: the tier has them open
                    for name in FILE_NAMES:
                        (directory / name).unlink(missing_ok=True)
                    if is_made:
                        directory.rmdir()
        raise


class Steps:
    """One progress bar for copying and verifying, half of it each; both give bytes done, of how many."""

    def __init__(self, show: Callable[[int, int], None] | None) -> None:
        self._show, self._total = show or (lambda *_: None), 0

    def copied(self, done: int, total: int) -> None:
        self._total = total
        self._show(done, 2 * total)

    def verified(self, done: int, total: int) -> None:
        self._show(self._total + self._total * done // max(1, total), 2 * self._total)


@contextlib.contextmanager
def new_tier(work: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    """A row file to be written, with the store's tables; synced at the end of the block, so that it needs no anchor."""
    tier = LmdbColdTier(work, store_id=bytes.fromhex(manifest.store_id), readonly=False)
    with contextlib.closing(tier):
        tier.set_tables(manifest.shapes)
        yield tier
    with rows_path(work).open("rb") as file:
        os.fsync(file.fileno())


def bytes_on_device(directory: Path) -> int:
    return rows_path(directory).stat().st_blocks * 512


class BackupReport(NamedTuple):
    """What was copied, to the directory ``target``."""

    target: Path
    version: int  # the last commit in it; 0 if there is none
    versions: tuple[int, ...]  # all that it keeps, ascending
    size_bytes: int  # length of its row file
    verified: VerifyReport | None  # what was checked, with ``verify=True``


def back_up(
    tier: LmdbColdTier, directory: Path, target: str | os.PathLike[str], *, verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BackupReport:  # fmt: skip
    """Copy a store as it is on SSD, with all versions that it keeps, into another directory.

    Any thread may call it while others train and commit. Rows that were not committed are not in the backup. A store
    open for reading is copied as it was when it was opened or last refreshed. The backup is the same store at an
    earlier time, with the same identity. It is synced, and its files were opened once.

    Meanwhile the writer reuses no page of what is copied: the store's file grows by what is written.

    Args:
        target: must not exist, or be empty, or hold only what an interrupted backup left.
        verify: also read the backup and check every row.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises, and nothing is left of the backup:
        ClosedError. ValueError: the target is inside the store's directory. FileExistsError: it holds something.
        FileNotFoundError: there is no directory to make it in. DiskFullError: no free space for it.
        StoreReplacedError: the store was moved. DamagedError: it is not sound. TierstoreError: the system refused, or
            another process writes the target.
    """
    source, target = directory.resolve(), Path(target).resolve()
    require_outside(target, source)
    with contextlib.ExitStack() as stack:
        snapshot = shielded(stack.enter_context)(tier.lease_tree())
        work = stack.enter_context(new_store(target, BACKUP_WORK_NAME))
        steps, path = Steps(progress), rows_path(work)
        require_room(path, copied_bytes(snapshot))
        copy_rows_file(snapshot, path, steps.copied if verify else progress or steps.copied)
        # Read after the snapshot was taken: a writer makes a table before it commits rows of it.
        Manifest.read(source).write(work)
        version, verified = _check(work, snapshot, steps if verify else None)
        size_bytes = path.stat().st_size
    return BackupReport(target, version[-1] if version else 0, version, size_bytes, verified)


def _check(work: Path, snapshot: Snapshot, steps: Steps | None) -> tuple[tuple[int, ...], VerifyReport | None]:
    """Open the backup, which walks its trees: it must be a store with the snapshot's versions, which it returns."""
    try:
        manifest, cold, _ = open_files(work, readonly=True)
        with contextlib.closing(cold):
            kept = read_head(snapshot).kept
            if cold.versions != kept:
                raise DamagedError(f"{work} keeps versions {cold.versions}, not {kept}")
            cold.set_tables(manifest.shapes)
            return kept, None if steps is None else cold.verify(steps.verified)
    except DamagedError as error:
        raise DamagedError(
            f"the backup is not sound, most likely because the store is not: check it with tierstore verify ({error})"
        ) from error
