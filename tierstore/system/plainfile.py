"""Reading a file of a directory that may be hostile: a plain file of bounded size, or nothing."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import FormatError, TruncatedError
from .oserrors import translate_os_error


def require_plain_file(path: Path) -> None:
    """FormatError if there is something at ``path`` that is no plain file: a link would lead out of the directory, a
    pipe would hang a process that opens it, and a device may do anything."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise translate_os_error(error, path) from error
    if not stat.S_ISREG(mode):
        raise FormatError(
            f"{path} is {_kind(mode)}, not a plain file, and is not followed; restore it from a copy of the store"
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
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FormatError(f"{path} is {_kind(mode)}, not a plain file")
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


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFDIR: "a directory",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a block device",
        stat.S_IFCHR: "a character device",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")
