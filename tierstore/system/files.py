"""Files: what the system's errors amount to, new files that last, locks between processes, reading a directory that may
be hostile, and files that are there whole or not at all.

A file is durable once its own content and the directory that names it are synced.
"""

import contextlib
import errno
import fcntl
import math
import os
import re
import resource
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ..errors import DiskFullError, FormatError, ReadOnlyError, TierstoreError, TruncatedError
from .sizes import format_size

RESTORE: Final = "Restore the store's directory from a copy, or save what is sound: tierstore repair DIR NEW_DIR"
"""The way out where what is on disk is not what was written."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_PERMITTED: Final = (errno.EACCES, errno.EPERM)
LACKED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EXDEV, errno.ENODEV)
"""What the system says of a call that a file system does not have."""
TOLD: Final = (errno.EROFS, *NOT_PERMITTED, *LACKED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
"""What ``translate_os_error`` has more words for than the system."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_COPY: Final = "restore it from a copy of the store"
_PAUSE_SECONDS: Final = 0.01
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device", stat.S_IFCHR: "a character device",
}  # fmt: skip
_ULIMIT: Final = (
    "`ulimit -v` allows {:.1f} GiB of address space, and a store maps several times the size of its row file (which "
    "takes no memory): run `ulimit -v unlimited`, and try again."
)


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Has the OSError of a file system without it name it."""
    try:
        yield
    except OSError as error:
        if error.errno in LACKED:
            error.strerror = f"no {what} ({error.strerror})"
        raise


def translate_os_error(
    error: OSError, path: str | os.PathLike[str], *, instead: str = 'open the store with mode="r"'
) -> TierstoreError:
    """The error of ours for what the system said while ``path`` was used; ``instead`` of writing, do what that says."""
    kind, said = TierstoreError, f"{error.strerror or error}."
    if error.errno in FULL:
        kind = DiskFullError
        said = "no space left on the file system; the last commit is intact. Free some space and try again."
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        said = "out of file descriptors; raise `ulimit -n` or close files, and try again."
    elif error.errno == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        is_limited = limit != resource.RLIM_INFINITY
        said = (
            _ULIMIT.format(limit / 2**30) if is_limited else "the system has no memory left; free some, and try again."
        )
    elif error.errno == errno.EROFS:
        kind, said = ReadOnlyError, f"the file system is read-only; {instead}."
    elif error.errno in NOT_PERMITTED:
        said = (
            "this user lacks the permission; change the owner or the mode of the file and its directory, or, if "
            f"writing was refused, {instead}."
        )
    elif error.errno == errno.ESTALE:
        said = "it is gone from the network file system's server; open it again."
    elif error.errno in LACKED:
        said = (
            f"its file system, or this system, lacks what is needed there: {error.strerror}. Use a local file system, "
            "as ext4 or XFS; Lustre has locks where it is mounted with -o flock."
        )
    return kind(f"{path}: {said}")


def was_url(path: Path) -> bool:
    """Whether a path was made of a URL, of which it keeps one slash."""
    return any(map(_SCHEME.fullmatch, path.parts[:-1]))


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, durably. OSError if the system refuses. ValueError: it is a URL."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if was_url(Path(*(path.name for path in reversed(missing)))):
        raise ValueError(f"{directory} is a URL, and what is written here are folders of this machine: give a path")
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def directory_locked(directory: Path) -> contextlib.AbstractContextManager[int]:
    """Hold a directory's lock while files are made that must not be there yet: not every file system has links.
    Waits a minute for another process, then TierstoreError. OSError: no such directory."""
    refusal = "{}: another process has been making files there for a minute; try again later"
    return output_locked(directory, os.O_RDONLY | os.O_DIRECTORY, refusal, patience_seconds=60.0)


@contextlib.contextmanager
def output_locked(
    path: Path, flags: int, refusal: str = "{} is being written by another process; wait for it to end", *,
    patience_seconds: float = 0.0,
) -> Iterator[int]:  # fmt: skip
    """Open a file or directory with its lock; gives the descriptor. TierstoreError, the refusal, if another process has
    it locked for so long. OSError: it cannot be opened. A forked process may have a copy of the descriptor, so the end
    unlocks it, but not in that process."""
    deadline, owner = time.monotonic() + patience_seconds, os.getpid()
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                with needing("locks of files and directories, flock"):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TierstoreError(refusal.format(path)) from None
            time.sleep(_PAUSE_SECONDS)
        try:
            yield descriptor
        finally:
            if os.getpid() == owner:
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
        raise FormatError(f"{path} is {kind}, not a plain file, and is not followed; {_COPY}")


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
            raise TruncatedError(f"{path} is empty; {_COPY}")
        if size > max_bytes:
            raise FormatError(f"{path} has {size} bytes and may have {max_bytes}; {_COPY}")
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise translate_os_error(error, path) from error


@contextlib.contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """DiskFullError, ReadOnlyError or TierstoreError where the system has no space for a new file, or refuses it."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(
                f"{path}: no space left on the file system ({error.strerror}); nothing was kept of it. "
                "Free some space, or choose another place"
            ) from error
        if error.errno in TOLD:
            raise translate_os_error(error, error.filename or path, instead="choose another place") from error
        raise


def require_room(path: Path, size_bytes: int) -> None:
    """DiskFullError now rather than after an hour, if so many bytes will not fit."""
    free = free_bytes(path.parent)
    if free < size_bytes:
        raise DiskFullError(
            f"{path}: {format_size(size_bytes)} are needed and {format_size(free)} are free; nothing was written. "
            "Free some space, or choose another place"
        )


def require_parent(path: Path) -> None:
    """FileNotFoundError if there is no directory to make ``path`` in."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory; make it first")


def require_new(path: Path, *, force: bool) -> None:
    """What would prevent ``partial_file``, before there is anything to write: FileExistsError without ``force``,
    FileNotFoundError, TierstoreError."""
    if path.is_dir():
        raise FileExistsError(f"{path} is a directory; choose the name of a file")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; choose another name, or overwrite it with --force")
    require_parent(path)
    if not os.access(path.parent, os.W_OK):
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise translate_os_error(denied, path.parent, instead="choose another place")


def require_other(path: Path, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """FileExistsError if ``path`` is one of the files that are read, so that it is not lost."""
    for read in inputs:
        if path.exists() and os.path.exists(read) and path.samefile(read):
            raise FileExistsError(f"{path} is read; choose another name to write to")


@contextlib.contextmanager
def partial_file(path: Path, *, force: bool) -> Iterator[int]:
    """A file descriptor to write to; on leaving, the file is made durable and gets its name, or is removed on an
    error. A ``.partial`` file left by a process that was killed is written over. Errors as of ``require_new``,
    DiskFullError, TierstoreError."""
    require_new(path, force=force)
    partial = path.with_name(path.name + ".partial")
    with output_errors(path):
        with output_locked(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as descriptor:
            try:
                os.ftruncate(descriptor, 0)
                yield descriptor
                os.fsync(descriptor)
                require_new(path, force=force)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        sync_directory(path.parent)


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write a file of text in UTF-8, whole or not at all; errors as of ``partial_file``. Bytes that are no text are
    escaped."""
    with partial_file(path, force=force) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="backslashreplace"))
