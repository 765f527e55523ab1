"""``writer.lock``: who may write to a store's directory."""

import fcntl
import os
import weakref
from pathlib import Path
from typing import Final

from ..errors import StoreLockedError
from ..oserrors import translate_os_error
from .forks import disown_in_forks

__all__ = ["LOCK_NAME", "WriterLock"]

LOCK_NAME: Final = "writer.lock"
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_MAX_BYTES: Final = 64
_OR_READ: Final = 'or open with mode="r"'


class WriterLock:
    """The directory is locked for this process until ``release``, or until the process ends.

    Raises:
        StoreLockedError: says what is known of the process that holds it.
        TierstoreError: the lock cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK_NAME
        self._descriptor = -1
        disown_in_forks(self)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise translate_os_error(error, path) from error
        status = os.fstat(self._descriptor)
        self.identity: Final = status.st_dev, status.st_ino
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = _holder(self.identity, os.pread(self._descriptor, _MAX_BYTES, 0))
            self.disown()
            raise StoreLockedError(f"{directory}: {said}") from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n{_namespace()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise
        _HELD.add(self)

    def release(self) -> None:
        """Unlock, also where a child that was forked without Python's knowledge has a copy of the descriptor."""
        _HELD.discard(self)
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.disown()

    def disown(self) -> None:
        """See ``forks.Inherited``."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_HELD: Final["weakref.WeakSet[WriterLock]"] = weakref.WeakSet()


def _namespace() -> str:
    """What tells process ids apart that mean different processes; empty if the system does not say."""
    try:
        return str(os.stat(_NAMESPACE).st_ino)
    except OSError:
        return ""


def _holder(identity: tuple[int, int], content: bytes) -> str:
    """Who has the lock, as far as it is known, and what to do."""
    if any(lock.identity == identity for lock in _HELD):
        return f"this process ({os.getpid()}) has the store open for writing already; close it there first."
    number, _, namespace = content.decode("ascii", "replace").strip().partition("\n")
    is_number = number.isdecimal() and len(number) < 10
    if not is_number:
        return f"another process has the store open for writing; end it first, {_OR_READ}."
    if namespace != _namespace():
        return (
            f"a process in another container, {number} there, or a child of it has the store open for writing; end it "
            f"first, {_OR_READ}."
        )
    if int(number) == os.getpid() or not _exists(int(number)):
        return (
            f"process {number} had the store open for writing and is gone, but a child of it, or a process on another "
            f"machine, holds the lock; end that one first, {_OR_READ}."
        )
    return f"process {number} has the store open for writing; end it first, {_OR_READ}."


def _exists(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
