"""The anchor: which tree of the row file a power loss falls back to.

Transactions do not wait for the device, as that would be slow; so LMDB's two meta pages may reach it before the pages
they lead to. Instead:

1. An *anchor* is set when the store is opened for writing, at each commit, and in the background whenever much was
   written: both meta pages are copied, the file is synced, then the copy goes to ``rows.anchor``, synced too.
2. From before that copy is written until the next anchor stands, the anchored tree is pinned (``pins.py``): LMDB reuses
   no page of it. So whatever of later transactions reached the device, all its pages are as they were.
3. A process that opens the store for writing and finds other meta pages puts the copy back (``opened.py``). The
   anchored tree holds the last commit whole; what it holds beyond that is dropped by its epoch.

The file grows by what is written between two anchors: up to three times ``GROWTH_BYTES`` lie between the oldest pin and
the newest page, or 1/32 of the segments if that is more, up to ``4 * GROWTH_BYTES``.

What the system holds in memory may never reach the device, even if only the process died: it may drop a page that it
could not write, and call the next sync a success. So only what an anchor vouches for is built on, and the anchor itself
is written once more first.

The file holds two slots, written in turn, each with a checksum: a slot cut short leaves the other, whose tree is still
pinned. It gets its name when it is whole, with space for both slots, so that no later anchor needs any.
"""

import contextlib
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import ChecksumError, DamagedError, FormatError, TierstoreError
from ..system.files import sync_directory, write_all
from ..system.killpoints import reach
from ..system.oserrors import translate_os_error
from .btree import META_READ_BYTES, sound_metas
from .checksum import bytes_checksum
from .snapshot import Snapshot, meta_page

if TYPE_CHECKING:
    from .opened import OpenFile

ANCHOR_NAME: Final = "rows.anchor"
GROWTH_BYTES: Final = 16 * 2**20
_GROWTH_PART: Final = 32
_MOST_GROWTHS: Final = 4
"""Written between two anchors of the background: so much, or this part of the segments if that is more, at most four
times as much. With fewer anchors more pages wait to be free, and LMDB writes much of their list in each transaction."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SLOT_BYTES: Final = 4096
_HEAD: Final = struct.Struct("<8sQ16s16sQQ")
_MAGIC: Final = b"tieranc2"
_STAMP_BYTES: Final = 16
_PAGE_BYTES: Final = tuple(1 << bits for bits in range(9, 16))  # page sizes of LMDB
_BODY_BYTES: Final = _HEAD.size + 2 * META_READ_BYTES


class SyncError(OSError):
    """The device failed to sync a file, and must not be asked again."""


class Anchor(NamedTuple):
    number: int
    store_id: bytes
    boot_id: bytes
    page_bytes: int
    txn_id: int
    metas: tuple[bytes, bytes]


def boot_id() -> bytes:
    """16 bytes that change when the machine starts again; zeros where the system has none."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def stamp_rows_file(path: Path, store_id: bytes, page_bytes: int) -> None:
    """Write the store's id at the end of the first meta page, which LMDB leaves alone after it made the file.

    The id that counts is a record in the tree; this one can be read before the tree can be trusted.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        write_all(descriptor, store_id, page_bytes - _STAMP_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_stamp(path: Path, page_bytes: int) -> bytes:
    """What ``stamp_rows_file`` wrote."""
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), _STAMP_BYTES, page_bytes - _STAMP_BYTES)


class AnchorKeeper:
    """Sets anchors for the one writer of a row file, which calls it between its transactions.

    Args:
        sync: make all transactions so far durable; may be called during a later transaction.
        pin: pins the tree as it is.
    """

    def __init__(self, file: "OpenFile", *, sync: Callable[[], None], pin: Callable[[], Snapshot]) -> None:
        self._file = file
        self._sync = sync
        self._pin = pin
        self._executor = ThreadPoolExecutor(1, "tierstore-anchor")
        self._anchored: tuple[Snapshot, tuple[bytes, bytes]] | None = None
        self._pending: tuple[Snapshot, tuple[bytes, bytes], Future[None]] | None = None
        self._written_bytes = 0  # since the last pin
        self._between_bytes = 0  # written between the two pins, while there are two

    def set(self) -> None:
        """Make the tree as it is the anchor, and return when it is. TierstoreError: the row file was moved, or the
        device refused; the anchor before stands. After a failed sync the file ``has_failed``: a system that failed to
        write a page may count it as written the next time it is asked."""
        self.start()
        self.settle()

    def start(self) -> Future[None]:
        """Begin to make the tree as it is the anchor, in the background; ``settle`` ends it. TierstoreError: the anchor
        before this one failed."""
        self.settle()
        pinned = self._pin()
        try:
            metas = self._read_metas()
            future = self._submit(metas)
        except BaseException:
            pinned.close()
            raise
        self._between_bytes, self._written_bytes = self._written_bytes, 0
        self._pending = pinned, metas, future
        return future

    def _read_metas(self) -> tuple[bytes, bytes]:
        return meta_page(self._file.map, 0), meta_page(self._file.map, self._file.page_bytes)

    def _submit(self, metas: tuple[bytes, bytes]) -> Future[None]:
        try:
            return self._executor.submit(self._make, metas)
        except RuntimeError:  # the interpreter ends, and nothing begins in a thread any more
            self._make(metas)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _make(self, metas: tuple[bytes, bytes]) -> None:
        file = self._file
        self._sync()
        reach("anchor: tree synced")
        file.map.pins.require_in_place()
        try:
            save_anchor(file.path, file.store_id, file.page_bytes, metas)
        except OSError as error:
            if isinstance(error, SyncError):
                file.has_failed = True
            path = file.path.with_name(ANCHOR_NAME)
            translated = translate_os_error(error, path)
            if type(translated) is TierstoreError:
                translated = TierstoreError(
                    f"{translated} The last commit is intact: close the store and open it again."
                )
            raise translated from error

    def wrote(self, size_bytes: int, live_bytes: int) -> None:
        """Set an anchor in the background if enough was written; wait for the last one if that falls too far behind.

        Args:
            size_bytes: what the last transaction wrote, or took out of use if that is more: pages of the tree, too.
            live_bytes: size of the segments in the tree.

        Raises:
            TierstoreError: the background's last anchor failed.
        """
        self._written_bytes += size_bytes
        limit = min(max(GROWTH_BYTES, live_bytes // _GROWTH_PART), _MOST_GROWTHS * GROWTH_BYTES)
        behind = self._pending is not None and not self._pending[2].done()
        if self._written_bytes >= limit and not (behind and self._between_bytes + self._written_bytes < 3 * limit):
            self.start()

    def settle(self) -> None:
        """Wait for the anchor in flight, if there is one; from then on it is the one that is pinned. TierstoreError: it
        failed."""
        if self._pending is None:
            return
        pinned, metas, future = self._pending
        if (error := future.exception()) is not None:
            self._pending = None
            pinned.close()
            raise error
        before = self._anchored
        self._anchored, self._pending = (pinned, metas), None
        if before is not None:
            before[0].close()

    def close(self) -> None:
        """Set a last anchor if the tree has changed since, so that readers find it sound after the machine has stopped;
        then unpin. An anchor that fails now is of no matter: the one before stands."""
        with contextlib.suppress(TierstoreError, OSError):
            self.settle()
            if not self._file.has_failed and (self._anchored is None or self._read_metas() != self._anchored[1]):
                self.set()
        self.stop()
        if self._anchored is not None:
            self._anchored[0].close()
            self._anchored = None

    def stop(self) -> None:
        """Wait for the anchor in flight and set no other one; all stays pinned."""
        self._executor.shutdown()


def save_anchor(path: Path, store_id: bytes, page_bytes: int, metas: tuple[bytes, bytes]) -> None:
    """Set the anchor to the trees that these meta pages lead to; they must be synced, and stay pinned. OSError,
    SyncError among them: the device refused; the anchor before stands."""
    if len(found := sound_metas(*metas)) < 2:
        raise DamagedError(f"{path}: a meta page is damaged; restore the store's directory from a copy.")
    anchor_path = path.with_name(ANCHOR_NAME)
    is_new = not anchor_path.exists()
    newest = None if is_new else newest_slot(_slots(anchor_path))
    number = 1 if newest is None else newest.number + 1
    slot = _slot(Anchor(number, store_id, boot_id(), page_bytes, found[0].txn_id, metas))
    if is_new:
        _replace(anchor_path, bytes(_place(number)) + slot)
    else:
        _put(anchor_path, slot, _place(number))


def renew_anchor(path: Path, anchor: Anchor) -> None:
    """Write an anchor's slot once more, as it is: the device may not have it yet."""
    _put(path.with_name(ANCHOR_NAME), _slot(anchor), _place(anchor.number))


def _slot(anchor: Anchor) -> bytes:
    body = _HEAD.pack(_MAGIC, *anchor[:-1]) + b"".join(anchor.metas)
    return (body + bytes_checksum(body).to_bytes(8, "little")).ljust(_SLOT_BYTES, b"\0")


def _replace(path: Path, data: bytes) -> None:
    """Have a file hold this, all or nothing."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    _put(draft, data, 0)
    os.replace(draft, path)
    sync_directory(path.parent)


def _place(number: int) -> int:
    """Where the slot of the anchor with this number begins; the first is written to the second slot."""
    return number % 2 * _SLOT_BYTES


def _put(path: Path, data: bytes, place: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data, place)
        reach("anchor: slot written")
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise SyncError(*error.args) from error
        reach("anchor: slot synced")
    finally:
        os.close(descriptor)


def require_sound(path: Path, store_id: bytes) -> None:
    """Before an open for reading.

    Raises:
        DamagedError: the machine stopped while the store was open for writing.
        ChecksumError, FormatError: as for ``recover``.
    """
    anchor = load_anchor(path, store_id)
    if anchor is not None and not is_sound(path, anchor):
        raise DamagedError(
            f"{path}: the machine stopped, or a write failed, while the store was open for writing; open it once with "
            'mode="w", which goes back to the last commit.'
        )


def is_sound(path: Path, anchor: Anchor) -> bool:
    """Whether the file is as the anchor says, or as a writer left it and the machine has not stopped since.

    LMDB leaves a mixture in a meta page whose write failed: then there are not two.
    """
    metas = read_metas(path, anchor.page_bytes)
    return metas == anchor.metas or (is_of_this_boot(anchor) and len(sound_metas(*metas)) == 2)


def is_of_this_boot(anchor: Anchor) -> bool:
    """Whether the machine has not stopped since, as far as it tells."""
    current = boot_id()
    return anchor.boot_id == current and any(current)


def load_anchor(path: Path, store_id: bytes) -> Anchor | None:
    """The anchor, or None if there is none for this row file, whose damage others will report. ChecksumError: the
    anchor is damaged. FormatError: the row file is older than it."""
    try:
        content = _slots(path.with_name(ANCHOR_NAME))
    except FileNotFoundError:
        return None
    anchor = newest_slot(content)
    if anchor is None:
        raise ChecksumError(f"{path.with_name(ANCHOR_NAME)} is damaged; restore the store's directory from a copy.")
    if not read_stamp(path, anchor.page_bytes) == anchor.store_id == store_id:
        return None
    metas = sound_metas(*read_metas(path, anchor.page_bytes))
    if not metas or metas[0].txn_id < anchor.txn_id:
        if len(metas) < 2:
            return None
        raise FormatError(
            f"{path} is older than {ANCHOR_NAME} beside it: one of the two was replaced. Restore the whole directory "
            "from one copy."
        )
    return anchor


def _slots(path: Path) -> bytes:
    """Both slots; whatever else the file holds is not read."""
    with path.open("rb") as file:
        return file.read(2 * _SLOT_BYTES)


def newest_slot(content: bytes) -> Anchor | None:
    """The newest anchor whose slot matches its checksum."""
    found = []
    for place in range(2):
        slot = content[place * _SLOT_BYTES :][: _BODY_BYTES + 8]
        body, checksum = slot[:_BODY_BYTES], slot[_BODY_BYTES:]
        if len(checksum) == 8 and int.from_bytes(checksum, "little") == bytes_checksum(body):
            magic, number, store_id, boot, page_bytes, txn_id = _HEAD.unpack_from(body)
            metas = body[_HEAD.size :]
            if magic == _MAGIC and page_bytes in _PAGE_BYTES:
                pair = metas[:META_READ_BYTES], metas[META_READ_BYTES:]
                found.append(Anchor(number, store_id, boot, page_bytes, txn_id, pair))
    return max(found, key=lambda anchor: anchor.number, default=None)


def read_metas(path: Path, page_bytes: int) -> tuple[bytes, bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            first, second = (os.pread(file.fileno(), META_READ_BYTES, place) for place in (0, page_bytes))
    except OSError as error:
        raise translate_os_error(error, path) from error
    return first, second
