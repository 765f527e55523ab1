"""Making a new store in a directory: whole, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import TierstoreError
from ..io import LmdbColdTier
from ..io.files import FILE_NAMES, ROW_FILE_NAME, rows_path
from ..system.durable import names_in, output_locked, sync_directory
from ..system.killpoints import reach
from ..system.output import output_errors, require_parent
from .manifest import MANIFEST_NAME, Manifest, parts_in
from .opened import open_files


def require_outside(target: Path, source: Path) -> None:
    """ValueError if the target is the store ``source``, or lies within it."""
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the store itself; choose another directory")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} is inside the store {source}; choose a directory outside")


@contextlib.contextmanager
def new_store(target: Path, work_name: str, names: Sequence[str] = (ROW_FILE_NAME, MANIFEST_NAME)) -> Iterator[Path]:
    """A working directory within the target. On leaving, its files move to the target; on an error they are removed.

    The next call replaces what a killed process left.

    Args:
        work_name: of the working directory; what is in it may be deleted.
        names: of the files or folders, synced, in the order in which they are moved; others are removed. The last one
            makes the target whole: a store has no manifest before.

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
            if found - {work_name} and (work_name not in found or not found <= {work_name, *names[:-1]}):
                raise FileExistsError(
                    f"{target} is not empty (it holds {min(found - {work_name})}); choose a directory that is, or a "
                    "new one"
                )
            try:
                _clear(target, work_name, names)
                work.mkdir()
                yield work
                _move(work, target, names)
            except BaseException:
                if not (target / names[-1]).exists():
                    _clear(target, work_name, names)
                    if is_made:
                        target.rmdir()
                raise


def _clear(target: Path, work_name: str, names: Sequence[str]) -> None:
    """Remove what a killed process left."""
    if (target / work_name).is_dir():
        for path in (target / name for name in names):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        shutil.rmtree(target / work_name)


def _move(work: Path, target: Path, names: Sequence[str]) -> None:
    for name in names[:-1]:
        os.rename(work / name, target / name)
    sync_directory(target)
    reach("copy: rows in place")
    os.rename(work / names[-1], target / names[-1])
    sync_directory(target)
    sync_directory(target.parent)
    reach("copy: manifest in place")
    shutil.rmtree(work)
    reach("copy: done")


@contextlib.contextmanager
def kept_if_committed(directory: Path) -> Iterator[None]:
    """If the block raises, and made a store in the directory that has no commit yet, the store is removed again."""
    is_made, is_new = not directory.exists(), not (directory / MANIFEST_NAME).exists() and not parts_in(directory)
    try:
        yield
    except BaseException:
        if is_new and (directory / MANIFEST_NAME).exists():
            with contextlib.suppress(TierstoreError, OSError):
                _remove_unused(directory)
                if is_made:
                    directory.rmdir()
        raise


def _remove_unused(directory: Path) -> None:
    """Remove a store that nobody uses, unless something was committed."""
    _, tier, _ = open_files(directory, readonly=False)
    with contextlib.closing(tier):
        if tier.last_version:
            return
        (directory / MANIFEST_NAME).unlink()
    for name in FILE_NAMES:
        (directory / name).unlink(missing_ok=True)


class Steps:
    """One progress bar for copying and verifying, half of it each; each is told of bytes done, of how many."""

    def __init__(self, show: Callable[[int, int], None] | None) -> None:
        self._show = show
        self._total = 0

    def copied(self, done: int, total: int) -> None:
        self._total = total
        if self._show is not None:
            self._show(done, 2 * total)

    def verified(self, done: int, total: int) -> None:
        if self._show is not None:
            self._show(self._total + self._total * done // max(1, total), 2 * self._total)


@contextlib.contextmanager
def new_tier(work: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    """A row file to be written, with the store's tables; synced at the end of the block, so that it needs no anchor."""
    tier = LmdbColdTier(work, store_id=bytes.fromhex(manifest.store_id), readonly=False)
    with contextlib.closing(tier):
        manifest.add_tables(tier)
        yield tier
    with rows_path(work).open("rb") as file:
        os.fsync(file.fileno())


def bytes_on_device(directory: Path) -> int:
    """Bytes that a store's row file takes on the device."""
    return rows_path(directory).stat().st_blocks * 512
