"""Who may write to a store: the process that has the writer's lock on its row file (``pins.py``).

``writer.lock`` beside it only says who that is, for the message that another gets. No lock depends on it.
"""

import contextlib
import os
import weakref
from pathlib import Path
from typing import Final

import psutil

from ..errors import StoreLockedError
from ..system.forks import disown_in_forks
from .pins import Pins

LOCK_NAME: Final = "writer.lock"
_NAMESPACE: Final = Path("/proc/self/ns/pid")
_MAX_BYTES: Final = 64
_OR_READ: Final = 'or open with mode="r"'


class WriterLock:
    """The store is this process's to write to, until its pins are closed or the process ends.

    Args:
        pins: of the row file, open for writing.

    Raises:
        StoreLockedError: says what is known of the process that holds it.
        StoreReplacedError: another file was put in the place of this one.
        TierstoreError: the file system has no locks.
    """

    def __init__(self, directory: Path, pins: Pins) -> None:
        self.identity: Final = pins.identity
        if not pins.lock_for_writer():
            raise StoreLockedError(f"{directory}: {_holder(self.identity, _read(directory / LOCK_NAME))}")
        pins.require_in_place()
        _write(directory / LOCK_NAME, f"{os.getpid()}\n{_namespace()}\n".encode())
        _HELD.add(self)
        disown_in_forks(self)

    def release(self) -> None:
        """Forget that this process has the store open: its pins are about to be closed."""
        _HELD.discard(self)

    def disown(self) -> None:
        """See ``forks.Inherited``."""
        _HELD.discard(self)


_HELD: Final["weakref.WeakSet[WriterLock]"] = weakref.WeakSet()


def _namespace() -> str:
    """What tells process ids apart that mean different processes; empty if the system does not say."""
    try:
        return str(os.stat(_NAMESPACE).st_ino)
    except OSError:
        return ""


def _write(path: Path, content: bytes) -> None:
    """A full disk, or a file of another user's, leaves the message less exact."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, _MAX_BYTES, 0)
        finally:
            os.close(descriptor)
    return b""


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
