"""Who uses a row file. A reader locks the byte whose offset is its tree's transaction number, a writer its own byte.

The locks are of the open file (open-file-description locks, ``fcntl(2)``), on ``rows.lmdb`` itself: shared by readers,
exclusive for the writer. So no file can be removed that keeps a second writer out, and no process id or other
descriptor of the file matters. The bytes need not exist. The kernel drops the lock when nothing refers to the open file
any more. The file's map refers to it, so what is in the map stays locked if somebody closes the descriptor
(``os.closerange``); on overlayfs, where the map is of the file below, it does not.

Why no page is reused that a reader can see: LMDB's transaction n + 1 uses pages that transactions before n freed, so it
leaves the trees n and n - 1 whole. A reader locks byte n, and then looks whether n is still the newest transaction; if
not, it unlocks and begins again. The writer commits n + 1, which writes a meta page, and asks for locks before it
begins n + 2. The kernel orders the two: either the reader sees n + 1 and begins again, or the writer sees the lock.

LMDB reuses no page that a transaction in its own table of readers, ``rows.lmdb-lock``, can see. So the writer keeps one
read transaction (``OldestReader``), and writes into its place in the table, before each write transaction, the number
of the oldest tree that is read elsewhere. LMDB has no call for that. The place is found by what it holds, and
``Environment.readers`` must list what is written there (``MDB_reader`` in LMDB 0.9's mdb.c: transaction number of 8
bytes, process id of 4, thread; 64 bytes each).
"""

import contextlib
import errno
import fcntl
import glob
import os
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from ..errors import StoreLockedError, StoreReplacedError, TierstoreError
from ..system.files import needing, translate_os_error
from ..system.processes import OwnDescriptor
from .uring import Rings

_FLOCK: Final = struct.Struct("hhqqi4x")  # the system's ``struct flock``: type, whence, start, length, process id
_OWN_LOCKS: Final = re.compile(r"^lock:.* OFDLCK .* (\S+) (\d+) (\d+)$", re.MULTILINE)
"""File, first and last byte of each lock of an open file, as /proc shows them for its descriptor."""
WRITER_BYTE: Final = 2**62  # above all transaction numbers
_NAME_BYTE: Final = WRITER_BYTE + 1
_PATIENCE_SECONDS: Final = 60.0  # for a writer that puts meta pages back meanwhile
_PAUSE_SECONDS: Final = 0.01
_NOBODY: Final = 2**64 - 1  # no reader's transaction, in LMDB's table
_NUMBER: Final = struct.Struct("=Q")
_READER: Final = struct.Struct("=Qi")
_READER_BYTES: Final = 64


def lock_range(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Set, or with ``F_UNLCK`` clear, a lock of the open file; False if another open file has one in the way.
    ``length`` 0: to the end of all offsets."""
    try:
        with needing("locks of open files, F_OFD_SETLK"):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


class FileLocks:
    """An open row file, and the trees that are read through it. ``writable``: open it for writing. An overlay then
    copies a file of a lower layer, before anything is read of it. OSError: the file cannot be opened."""

    def __init__(self, path: "str | os.PathLike[str]", *, writable: bool = False) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._users: Counter[int] = Counter()
        self._file = OwnDescriptor(path, os.O_RDWR if writable else os.O_RDONLY)
        self.identity: Final = self._file.identity
        self.is_held: Final = self._file.is_held
        self.rings: Final = Rings(self._file)  # to read its cold pages

    @property
    def descriptor(self) -> int:
        return self._file.number

    def size_bytes(self) -> int:
        """Length of the file now; ClosedError if somebody closed the descriptor."""
        try:
            size_bytes = os.fstat(self._file.number).st_size
        except OSError as error:
            raise self._file.lost() from error
        if not self.is_held():
            raise self._file.lost()
        return size_bytes

    def require_in_place(self) -> None:
        """StoreReplacedError unless the path still names this file; ClosedError if somebody closed the descriptor."""
        self.size_bytes()
        try:
            found: os.stat_result | None = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError as error:
            raise translate_os_error(error, self._path) from error
        if found is None or (found.st_dev, found.st_ino) != self.identity:
            what = "was deleted" if found is None else "is another file than when the store was opened"
            raise StoreReplacedError(
                f"{self._path} {what}: the store was replaced, and what is open is the old one; open the store again"
            )

    def _failure(self, error: OSError) -> TierstoreError:
        return translate_os_error(error, self._path) if self.is_held() else self._file.lost()

    def lock_for_writer(self, *, shared: bool = False) -> None:
        """Take the writer's lock, until ``close``. ``shared``: keep writers out, no more. StoreLockedError: a writer,
        or a repair, has it; names its process. TierstoreError: the file system has no locks."""
        try:
            is_ours = lock_range(self.descriptor, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, WRITER_BYTE, 1)
        except OSError as error:
            raise self._failure(error) from error
        if not is_ours:
            who, reading = self.describe_holders(WRITER_BYTE), "" if shared else ', or open with mode="r"'
            raise StoreLockedError(f"{self._path}: {who} has the store open for writing; close it there{reading}.")

    @contextlib.contextmanager
    def readers_kept_out(self) -> Iterator[bool]:
        """Whether nobody reads the file through another open file; if so nobody begins to until the end of the block.
        It must be ``writable``."""
        is_alone = lock_range(self.descriptor, fcntl.F_WRLCK, 0, WRITER_BYTE)
        try:
            yield is_alone
        finally:
            if is_alone and self.is_held():
                lock_range(self.descriptor, fcntl.F_UNLCK, 0, WRITER_BYTE)

    def hold(self, txn_id: int) -> None:
        """Lock a tree, once more if it is locked already. StoreLockedError: a writer has been putting meta pages back
        for a minute. ClosedError: somebody closed the descriptor. TierstoreError: the file system has no locks."""
        with self._lock:
            if not self._users[txn_id]:
                self._lock_tree(txn_id)
            self._users[txn_id] += 1

    def _lock_tree(self, txn_id: int) -> None:
        self.size_bytes()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        try:
            while not lock_range(self.descriptor, fcntl.F_RDLCK, txn_id, 1):
                if time.monotonic() > deadline:
                    raise StoreLockedError(
                        f"{self._path}: a process that opens the store for writing is putting it back to its last "
                        f"commit, for more than {_PATIENCE_SECONDS:.0f} s; try again later"
                    )
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            raise self._failure(error) from error
        if not self.is_held():  # another file may have been locked
            with contextlib.suppress(OSError):
                lock_range(self.descriptor, fcntl.F_UNLCK, txn_id, 1)
            raise self._file.lost()

    def release(self, txn_id: int) -> None:
        with self._lock:
            self._users[txn_id] -= 1
            for unused in [each for each, users in self._users.items() if not users]:  # a call may have been cut short
                if self.is_held():
                    lock_range(self.descriptor, fcntl.F_UNLCK, unused, 1)
                del self._users[unused]

    def oldest(self, below: int) -> int | None:
        """The least tree under ``below`` that somebody reads, through this open file or another; None if there is none.
        ClosedError: somebody closed the descriptor, and it is no answer."""
        with self._lock:
            own = min((txn_id for txn_id in self._users if txn_id < below), default=None)
        found = self.oldest_elsewhere(below if own is None else own)
        return own if found is None else found

    def oldest_elsewhere(self, below: int) -> int | None:
        """``oldest`` of other open files, in this process or another. The kernel names any lock in the way of one over
        a range; so the range is cut there until none is left."""
        found, end = None, below
        try:
            while end > 0:
                asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, end, 0)
                kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, asked))
                if kind == fcntl.F_UNLCK:
                    break
                found = end = start
        except OSError as error:
            raise self._failure(error) from error
        self.size_bytes()
        return found

    def describe_holders(self, place: int) -> str:
        """The processes that lock a byte, in words. /proc shows a descriptor's locks with the file as the kernel names
        it, which a lock of ours tells; to look at files would wait for their file systems, which may be dead."""
        found = set()
        with contextlib.suppress(OSError, IndexError):  # no locks, or no /proc
            lock_range(self.descriptor, fcntl.F_RDLCK, _NAME_BYTE, 1)
            own = _OWN_LOCKS.findall(Path(f"/proc/self/fdinfo/{self.descriptor}").read_text())[0][0]
            for path in glob.iglob("/proc/[0-9]*/fdinfo/*"):
                with contextlib.suppress(OSError):  # it is gone, or another user's
                    locks = _OWN_LOCKS.findall(Path(path).read_text())
                    if any(name == own and int(first) <= place <= int(last) for name, first, last in locks):
                        found.add(int(path.split("/")[2]))
            lock_range(self.descriptor, fcntl.F_UNLCK, _NAME_BYTE, 1)
        if found == {os.getpid()}:
            return f"this process ({os.getpid()})"
        if found:
            return f"process {', '.join(map(str, sorted(found)))}"
        return "a process that this one cannot see (of another user or container, or whose descriptors were closed)"

    def close(self) -> None:
        """Release all. Copies that were forked without Python's knowledge keep nothing either."""
        self.rings.close()
        if self.is_held():
            with contextlib.suppress(OSError):  # a file system without locks
                lock_range(self.descriptor, fcntl.F_UNLCK, 0, 0)
        self._file.close()


class OldestReader:
    """What LMDB's table of readers says of ours: the oldest tree of which LMDB must reuse no page, for the one writer.
    No transaction on ``environment``, opened for writing, is open. TierstoreError: the table is not what is known of
    LMDB 0.9."""

    def __init__(self, environment: "lmdb.Environment", path: Path, locks: FileLocks) -> None:
        self._environment = environment
        self._path = path
        self._locks = locks
        with contextlib.ExitStack() as stack:
            self._txn = environment.begin(write=False)
            stack.callback(lambda: self._txn.abort())  # the one of the end
            # Kept open: closing a descriptor of this file drops the locks of this process on it.
            self._table = OwnDescriptor(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(self._table.close)
            self._take_place()
            self._held = stack.pop_all()

    def begin_again(self) -> None:
        """To be called after LMDB's map was changed, which ends all transactions."""
        self._txn = self._environment.begin(write=False)
        self._take_place()

    def _take_place(self) -> None:
        """Find the number of our transaction, and write 0 there: all trees are in use, until the first ``update``."""
        self._number, wanted = 0, _READER.pack(self._txn.id(), os.getpid())
        table = os.pread(self._table.number, os.fstat(self._table.number).st_size, 0)
        for self._place in range(0, len(table) - _READER_BYTES + 1, _READER_BYTES):
            if table[self._place : self._place + len(wanted)] == wanted:
                os.pwrite(self._table.number, _NUMBER.pack(0), self._place)
                readers = self._environment.readers().splitlines()
                if [str(os.getpid()), "0"] in [line.split()[::2] for line in readers]:
                    return
                os.pwrite(self._table.number, wanted[: _NUMBER.size], self._place)
        raise TierstoreError(
            f"{self._path}: the table of readers of this LMDB, {lmdb.version()}, is not as that of 0.9; install the "
            "release of lmdb that tierstore asks for"
        )

    def update(self) -> None:
        """Enter the oldest tree that is read; to be called before each write transaction. ClosedError: somebody closed
        the descriptors, so that nothing tells what others read."""
        oldest = self._locks.oldest(self._environment.info()["last_txnid"])
        number = _NOBODY if oldest is None else oldest
        if number != self._number:
            if not self._table.is_held():
                raise self._table.lost()
            os.pwrite(self._table.number, _NUMBER.pack(number), self._place)
            self._number = number

    def close(self) -> None:
        self._held.close()
