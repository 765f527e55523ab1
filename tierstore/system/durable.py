"""Writing files that last, by one process at a time: the directory that names a new file must be synced too."""

import contextlib
import errno
import fcntl
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import TierstoreError
from .oserrors import needing

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.01


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, durably. OSError if the system refuses. ValueError: it is a
    URL."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if any(_SCHEME.fullmatch(path.name) for path in missing[1:]):
        raise ValueError(f"{directory} is a URL, and what is written here are folders of this machine: give a path")
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


@contextlib.contextmanager
def flocked(descriptor: int, kind: int, refusal: TierstoreError) -> Iterator[None]:
    """Hold a lock of an open file or directory, ``fcntl.LOCK_EX`` or ``LOCK_SH``, which forked processes do not
    keep. The refusal is raised if another process has it locked."""
    try:
        with needing("locks of files and directories, flock"):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refusal from None
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def output_locked(path: Path, flags: int) -> Iterator[int]:
    """Open a file or directory with its lock; gives the descriptor. TierstoreError if another process has it locked.
    OSError: it cannot be opened."""
    refusal = TierstoreError(f"{path} is being written by another process; wait for it to end")
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        with flocked(descriptor, fcntl.LOCK_EX, refusal):
            yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def directory_locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock while files are made that must not be there yet: not every file system has links.
    Waits a minute for another process, then TierstoreError. OSError: no such directory."""
    refusal = TierstoreError(f"{directory}: another process has been making files there for a minute; try again later")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(flocked(descriptor, fcntl.LOCK_EX, refusal))
                except TierstoreError:
                    if time.monotonic() > deadline:
                        raise
                else:
                    yield
                    return
            time.sleep(_PAUSE_SECONDS)
    finally:
        os.close(descriptor)


def names_in(directory: Path) -> set[str]:
    """What a directory holds; of one that is a file system's root, not its ``lost+found``."""
    return set(os.listdir(directory)) - {"lost+found"}


def free_bytes(directory: Path) -> float:
    """What is free for us on the file system; infinity where it does not tell its size (ramfs, tmpfs without one)."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else math.inf


def sync_directory(directory: Path) -> None:
    """Have the device hold the directory's entries. OSError if it refuses."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with needing("sync of directories"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it: a device that fills up takes a part and says so. OSError if it takes no more."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written
