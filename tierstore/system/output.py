"""A file that is there whole or not at all: written as ``NAME.partial``, synced, renamed."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import DiskFullError
from .files import free_bytes, output_locked, sync_directory
from .oserrors import FULL, TOLD, translate_os_error
from .sizes import format_size


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
