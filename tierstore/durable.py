"""Writing files that last, by one process at a time: the directory that names a new file must be synced too."""

import errno
import fcntl
import os
from pathlib import Path

from .errors import TierstoreError

__all__ = ["lock_output", "make_directory", "sync_directory", "write_all"]


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing, durably. OSError if the system refuses."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def lock_output(descriptor: int, path: Path) -> None:
    """Lock an open file or directory until it is closed; TierstoreError if another process has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierstoreError(f"{path} is being written by another process; wait for it to end") from None


def sync_directory(directory: Path) -> None:
    """Have the device hold the directory's entries. OSError if it refuses."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of it: a device that fills up takes a part and says so. OSError if it takes no more."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, offset = view[written:], offset + written
