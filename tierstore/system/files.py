"""Files: new ones that last, locks between processes, and reading a directory that may be hostile.

A file is durable once its own content and the directory that names it are synced.
"""

import contextlib
import errno
import fcntl
import math
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ..errors import FormatError, TierstoreError, TruncatedError
from .oserrors import needing, translate_os_error

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.01
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, durably. OSError if the system refuses. ValueError: it is a URL."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if any(_SCHEME.fullmatch(path.name) for path in missing[1:]):
        raise ValueError(f"{directory} is a URL, and what is written here are folders of this machine: give a path")
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


@contextlib.contextmanager
def output_locked(path: Path, flags: int) -> Iterator[int]:
    """Open a file or directory with its lock; gives the descriptor. TierstoreError if another process has it locked.
    OSError: it cannot be opened."""
    refusal = f"{path} is being written by another process; wait for it to end"
    with _locked(path, flags, refusal, patience_seconds=0.0) as descriptor:
        yield descriptor


@contextlib.contextmanager
def directory_locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock while files are made that must not be there yet: not every file system has links.
    Waits a minute for another process, then TierstoreError. OSError: no such directory."""
    refusal = f"{directory}: another process has been making files there for a minute; try again later"
    with _locked(directory, os.O_RDONLY | os.O_DIRECTORY, refusal, patience_seconds=_PATIENCE_SECONDS):
        yield


@contextlib.contextmanager
def _locked(path: Path, flags: int, refusal: str, *, patience_seconds: float) -> Iterator[int]:
    """Unlocks by itself: a forked process may have a copy of the descriptor."""
    deadline = time.monotonic() + patience_seconds
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                with needing("locks of files and directories, flock"):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TierstoreError(refusal) from None
            time.sleep(_PAUSE_SECONDS)
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def names_in(directory: Path) -> set[str]:
    """What a directory holds; of one that is a file system's root, not its ``lost+found``."""
    return set(os.listdir(directory)) - {"lost+found"}


def free_bytes(directory: Path) -> float:
    """What is free for us on the file system; infinity where it does not tell its size (ramfs, tmpfs without one)."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else math.inf


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


def require_plain_file(path: Path) -> None:
    """FormatError if there is something at ``path`` that is no plain file: a link would lead out of the directory, a
    pipe would hang a process that opens it, and a device may do anything."""
    try:
        _require_plain(path, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise translate_os_error(error, path) from error


def _require_plain(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
        raise FormatError(
            f"{path} is {kind}, not a plain file, and is not followed; restore it from a copy of the store"
        )


def open_plain_file(path: Path) -> BinaryIO:
    """A plain file, open for reading. FileNotFoundError, FormatError if it is no plain file, TierstoreError."""
    require_plain_file(path)
    try:
        # The two flags matter where the file was exchanged since: a link is refused, a pipe does not hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        raise translate_os_error(error, path) from error
    try:
        _require_plain(path, os.fstat(descriptor))
    except FormatError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_plain_file(path: Path, max_bytes: int) -> bytes:
    """The content of a plain file of at most ``max_bytes`` bytes; FormatError if it is larger, TruncatedError if
    empty."""
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise TruncatedError(f"{path} is empty; restore it from a copy of the store")
        if size > max_bytes:
            raise FormatError(f"{path} has {size} bytes and may have {max_bytes}; restore it from a copy of the store")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise translate_os_error(error, path) from error
