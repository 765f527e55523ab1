"""What the system's errors amount to, with the way out."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from typing import Final

from ..errors import DiskFullError, ReadOnlyError, TierstoreError

RESTORE: Final = "Restore the store's directory from a copy, or save what is sound: tierstore repair DIR NEW_DIR"
"""The way out where what is on disk is not what was written."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_PERMITTED: Final = (errno.EACCES, errno.EPERM)
LACKED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EXDEV, errno.ENODEV)
"""What the system says of a call that a file system does not have."""
TOLD: Final = (errno.EROFS, *NOT_PERMITTED, *LACKED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
"""What ``translate_os_error`` has more words for than the system."""


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
    if error.errno in FULL:
        return DiskFullError(
            f"{path}: no space left on the file system; the last commit is intact. Free some space and try again."
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TierstoreError(f"{path}: out of file descriptors; raise `ulimit -n` or close files, and try again.")
    if error.errno == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return TierstoreError(f"{path}: the system has no memory left; free some, and try again.")
        return TierstoreError(
            f"{path}: `ulimit -v` allows {limit / 2**30:.1f} GiB of address space, and a store maps several times the "
            "size of its row file (which takes no memory): run `ulimit -v unlimited`, and try again."
        )
    if error.errno == errno.EROFS:
        return ReadOnlyError(f"{path}: the file system is read-only; {instead}.")
    if error.errno in NOT_PERMITTED:
        return TierstoreError(
            f"{path}: this user lacks the permission; change the owner or the mode of the file and its directory, "
            f"or, if writing was refused, {instead}."
        )
    if error.errno == errno.ESTALE:
        return TierstoreError(f"{path}: it is gone from the network file system's server; open it again.")
    if error.errno in LACKED:
        return TierstoreError(
            f"{path}: its file system, or this system, lacks what is needed there: {error.strerror}. Use a local file "
            "system, as ext4 or XFS; Lustre has locks where it is mounted with -o flock."
        )
    return TierstoreError(f"{path}: {error.strerror or error}.")
