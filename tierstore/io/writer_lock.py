"""``writer.lock``: who may write to a store's directory."""

import fcntl
import os
import weakref
from pathlib import Path
from typing import Final

import psutil

from ..errors import StoreLockedError
from ..system.forks import OwnDescriptor, disown_in_forks
from ..system.oserrors import translate_os_error
from .mapped import hold_open, let_go

LOCK_NAME: Final = "writer.lock"
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_MAX_BYTES: Final = 64
_OR_READ: Final = 'or open with mode="r"'


class WriterLock:
    """The directory is locked for this process until ``release``, or until the process ends.

    A map keeps the lock if somebody closes the descriptor; not on overlayfs, see ``hold_open``.

    Raises:
        StoreLockedError: says what is known of the process that holds it.
        TierstoreError: the lock cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK_NAME
        self._map = 0
        disown_in_forks(self)
        try:
            self._file = OwnDescriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise translate_os_error(error, path) from error
        self.identity: Final = self._file.identity
        try:
            self._take(directory)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise translate_os_error(error, path) from error
            raise
        _HELD.add(self)

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = _holder(self.identity, os.pread(self._file.number, _MAX_BYTES, 0))
            raise StoreLockedError(f"{directory}: {said}") from None
        os.ftruncate(self._file.number, 0)
        os.pwrite(self._file.number, f"{os.getpid()}\n{_namespace()}\n".encode(), 0)
        self._map = hold_open(self._file.number)

    def release(self) -> None:
        """Unlock, also where a child that was forked without Python's knowledge has a copy of the descriptor."""
        _HELD.discard(self)
        if self._file.is_held():
            fcntl.flock(self._file.number, fcntl.LOCK_UN)
        self._file.close()
        if self._map:
            let_go(self._map)
            self._map = 0

    def disown(self) -> None:
        """See ``forks.Inherited``."""
        _HELD.discard(self)
        self._map = 0


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
        return f"this process ({os.getpid()}) has the store open for writing already; close it there first, {_OR_READ}."
    number, _, namespace = content.decode("ascii", "replace").strip().partition("\n")
    is_number = number.isdecimal() and len(number) < 10
    if not is_number:
        return f"another process has the store open for writing; end it first, {_OR_READ}."
    if namespace != _namespace():
        return (
            f"a process in another container, {number} there, or a child of it has the store open for writing; end it "
            f"first, {_OR_READ}."
        )
    if int(number) == os.getpid() or not psutil.pid_exists(int(number)):
        return (
            f"process {number} had the store open for writing and is gone, but a child of it, or a process on another "
            f"machine, holds the lock; end that one first, {_OR_READ}."
        )
    return f"process {number} has the store open for writing; end it first, {_OR_READ}."
