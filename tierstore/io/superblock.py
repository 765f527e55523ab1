"""The superblock, ``rows.anchor``: the tree that a power loss falls back to, the *anchored* one.

Transactions do not wait for the device, as that would be slow; so LMDB's two meta pages may reach it before the pages
they lead to. Instead:

1. A superblock is set when the store is opened for writing, at each commit, and in the background whenever much was
   written (``SuperblockWriter``): both meta pages are copied, the file is synced, then the copy goes to
   ``rows.anchor``, synced too.
2. From before that copy is written until the next superblock stands, the anchored tree is pinned
   (``reader_locks.py``): LMDB reuses no page of it, whatever of later transactions reaches the device.
3. A process that opens the store for writing and finds other meta pages puts the copy back (``recover``). The anchored
   tree holds the last commit whole; what it holds beyond that is dropped by its epoch.

The system may drop a page that it could not write, and call the next sync a success. So only what a superblock vouches
for is built on, also after the mere death of a process, and the superblock itself is written once more first.

The file holds two slots, written in turn, each with a checksum: a slot cut short leaves the other, whose tree is still
pinned. It gets its name when it is whole, with space for both slots, so that no later superblock needs any.
"""

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..errors import ChecksumError, DamagedError, FormatError, StoreLockedError
from ..system.files import RESTORE, sync_directory, translate_os_error, write_all
from ..system.killpoints import reach
from . import records
from .files import SUPERBLOCK_NAME, read_stamp
from .meta import META_READ_BYTES, Meta, bytes_checksum, newer_meta, parse_meta, sound_metas

if TYPE_CHECKING:
    from .reader_locks import FileLocks

SLOT_BYTES: Final = 4096
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HEAD: Final = struct.Struct("<8sQ16s16sQQ")
_MAGIC: Final = b"tieranc2"
_PAGE_BYTES: Final = tuple(1 << bits for bits in range(9, 16))  # page sizes of LMDB
_BODY_BYTES: Final = _HEAD.size + 2 * META_READ_BYTES


class SyncError(OSError):
    """The device failed to sync a file, and must not be asked again."""


class Superblock(NamedTuple):
    number: int
    store_id: bytes
    boot_id: bytes
    page_bytes: int
    txn_id: int
    metas: tuple[bytes, ...]


def boot_id() -> bytes:
    """16 bytes that change when the machine starts again; zeros where the system has none."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def save_superblock(path: Path, store_id: bytes, page_bytes: int, metas: tuple[bytes, ...]) -> None:
    """Vouch for the trees that these meta pages lead to; they must be synced, and stay pinned. OSError, SyncError among
    them: the device refused; the superblock before stands."""
    if len(found := sound_metas(*metas)) < 2:
        raise DamagedError(f"{path}: a meta page is damaged; restore the store's directory from a copy.")
    own_path = path.with_name(SUPERBLOCK_NAME)
    newest = _read_newest(own_path) if (is_there := own_path.exists()) else None
    number = 1 if newest is None else newest.number + 1
    slot = pack_slot(Superblock(number, store_id, boot_id(), page_bytes, found[0].txn_id, metas))
    if is_there:
        _put(own_path, slot, number % 2 * SLOT_BYTES)
        return
    draft = own_path.with_name(f"{SUPERBLOCK_NAME}.new")
    draft.unlink(missing_ok=True)
    _put(draft, bytes(SLOT_BYTES) + slot, 0)  # the first one goes to the second slot
    os.replace(draft, own_path)
    sync_directory(own_path.parent)


def pack_slot(superblock: Superblock) -> bytes:
    body = _HEAD.pack(_MAGIC, *superblock[:-1]) + b"".join(superblock.metas)
    return (body + bytes_checksum(body).to_bytes(8, "little")).ljust(SLOT_BYTES, b"\0")


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


def _read_newest(path: Path) -> Superblock | None:
    with path.open("rb") as file:
        return newest_slot(file.read(2 * SLOT_BYTES))


def newest_slot(content: bytes) -> Superblock | None:
    """The newest superblock of two slots whose slot matches its checksum."""
    found = []
    for place in (0, SLOT_BYTES):
        slot = content[place : place + _BODY_BYTES + 8]
        body, checksum = slot[:_BODY_BYTES], slot[_BODY_BYTES:]
        if len(checksum) == 8 and int.from_bytes(checksum, "little") == bytes_checksum(body):
            magic, number, store_id, boot, page_bytes, txn_id = _HEAD.unpack_from(body)
            metas = body[_HEAD.size :][:META_READ_BYTES], body[_HEAD.size + META_READ_BYTES :]
            if magic == _MAGIC and page_bytes in _PAGE_BYTES:
                found.append(Superblock(number, store_id, boot, page_bytes, txn_id, metas))
    return max(found, key=lambda superblock: superblock.number, default=None)


def read_metas(path: Path, page_bytes: int) -> tuple[bytes, ...]:
    try:
        with path.open("rb", buffering=0) as file:
            return tuple(os.pread(file.fileno(), META_READ_BYTES, place) for place in (0, page_bytes))
    except OSError as error:
        raise translate_os_error(error, path) from error


def load_superblock(path: Path, store_id: bytes) -> Superblock | None:
    """The superblock, or None if there is none for this row file, whose damage others will report. ChecksumError: the
    superblock is damaged. FormatError: the row file is older than it."""
    own_path = path.with_name(SUPERBLOCK_NAME)
    try:
        superblock = _read_newest(own_path)
    except FileNotFoundError:
        return None
    if superblock is None:
        raise ChecksumError(f"{own_path} is damaged; restore the store's directory from a copy.")
    if not read_stamp(path, superblock.page_bytes) == superblock.store_id == store_id:
        return None
    metas = sound_metas(*read_metas(path, superblock.page_bytes))
    if not metas or metas[0].txn_id < superblock.txn_id:
        if len(metas) < 2:
            return None
        raise FormatError(
            f"{path} is older than {SUPERBLOCK_NAME} beside it: one of the two was replaced. Restore the whole "
            "directory from one copy."
        )
    return superblock


def is_of_this_boot(superblock: Superblock) -> bool:
    current = boot_id()
    return superblock.boot_id == current and any(current)


def _is_sound(path: Path, superblock: Superblock) -> bool:
    """Whether the file is as the superblock says, or as a writer left it and the machine has not stopped since. LMDB
    leaves a mixture in a meta page whose write failed: then there are not two."""
    metas = read_metas(path, superblock.page_bytes)
    return metas == superblock.metas or (is_of_this_boot(superblock) and len(sound_metas(*metas)) == 2)


def require_sound(path: Path, store_id: bytes) -> None:
    """Before an open for reading. DamagedError: the machine stopped while the store was open for writing.
    ChecksumError, FormatError: as for ``recover``."""
    superblock = load_superblock(path, store_id)
    if superblock is not None and not _is_sound(path, superblock):
        raise DamagedError(
            f"{path}: the machine stopped, or a write failed, while the store was open for writing; open it once with "
            'mode="w", which goes back to the last commit.'
        )


def recover(path: Path, store_id: bytes, locks: "FileLocks") -> None:
    """Have the device hold the superblock, and put its meta pages back: before an open for writing.

    Done only if the anchored tree is whole, and nobody reads another one: while a reader of the same boot has the file
    open, the tree that it sees stays. Whatever step it is cut short at, the next recovery does the same again.

    Raises:
        ChecksumError, FormatError: the superblock is damaged, or the row file older than it.
        DamagedError: the anchored tree is not whole; nothing was changed.
        StoreLockedError: others read a tree that a failed write has left. OSError: the device refused.
    """
    superblock = load_superblock(path, store_id)
    if superblock is None:
        return
    is_in_place = read_metas(path, superblock.page_bytes) == superblock.metas
    if not is_in_place:
        _require_whole(path, superblock, locks)
    _put(path.with_name(SUPERBLOCK_NAME), pack_slot(superblock), superblock.number % 2 * SLOT_BYTES)
    if is_in_place:
        return
    with locks.readers_kept_out() as is_alone:
        if is_alone:
            for number, meta in enumerate(superblock.metas):
                write_all(locks.descriptor, meta, number * superblock.page_bytes)
            reach("recovery: anchored meta pages put back")
            os.fdatasync(locks.descriptor)
        elif not _is_sound(path, superblock):
            raise StoreLockedError(
                f"{path}: a write failed while the store was open for writing, and others read it; end them, then "
                "open it again."
            )


def _require_whole(path: Path, superblock: Superblock, locks: "FileLocks") -> None:
    """DamagedError unless the anchored tree holds all that an open looks at: both trees, records and payload."""
    from .mapped import FileMap
    from .snapshot import Tree

    file_map = FileMap(path, path.stat().st_size, locks)
    try:
        found = [meta for meta in map(parse_meta, superblock.metas) if isinstance(meta, Meta)]
        meta = newer_meta(*found) if len(found) == 2 else None
        if meta is None or any(each.page_bytes != superblock.page_bytes for each in found):
            raise DamagedError("its meta pages are none")
        tree = Tree(path, file_map, meta)
        tree.check_free_pages()
        records.check_store(tree, superblock.store_id)
        records.read_payload(tree, records.read_record(tree, records.read_head(tree).current))
    except DamagedError as error:
        said = str(error).removesuffix(RESTORE).removeprefix(f"{path}: ").strip()
        look = ' mode="r" shows what can still be read.' if _is_sound(path, superblock) else ""
        raise DamagedError(
            f"{path}: the last writer was cut short, and the state that it would go back to is damaged ({said}). "
            f"Nothing was changed.{look} {RESTORE}"
        ) from error
    finally:
        file_map.close()
