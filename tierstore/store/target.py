"""Making a new store in a directory: whole, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..io import ROW_FILE_NAME
from ..system.durable import names_in, output_locked, sync_directory
from ..system.output import output_errors, require_parent
from .manifest import MANIFEST_NAME


def require_outside(target: Path, source: Path) -> None:
    """ValueError if the target is the store ``source``, or lies within it."""
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the store itself; choose another directory")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} is inside the store {source}; choose a directory outside")


@contextlib.contextmanager
def new_store(target: Path, work_name: str, names: Sequence[str] = (ROW_FILE_NAME,)) -> Iterator[Path]:
    """A working directory within the target. On leaving, its files move to the target; on an error they are removed.

    The manifest moves last: a target without one is no store. The next call replaces what a killed process left.

    Args:
        work_name: of the working directory; what is in it may be deleted.
        names: of the files beside the manifest, synced, as they are moved; others are removed.

    Raises:
        FileExistsError: the target is a file, or holds something. FileNotFoundError: nor is there a directory for it.
        TierstoreError: the system refuses, or another process is at work there. DiskFullError: no room.
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
            if found - {work_name} and (work_name not in found or not found <= {work_name, *names}):
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
                if not (target / MANIFEST_NAME).exists():
                    _clear(target, work_name, names)
                    if is_made:
                        target.rmdir()
                raise


def _clear(target: Path, work_name: str, names: Sequence[str]) -> None:
    """Remove what a killed process left."""
    if (target / work_name).is_dir():
        for name in names:
            (target / name).unlink(missing_ok=True)
        shutil.rmtree(target / work_name)


def _move(work: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        os.rename(work / name, target / name)
    sync_directory(target)
    os.rename(work / MANIFEST_NAME, target / MANIFEST_NAME)
    shutil.rmtree(work)
    sync_directory(target)
    sync_directory(target.parent)


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
