"""The files of the cold tier: creating, opening and copying them, and what LMDB's errors mean."""

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lmdb

from ..errors import DamagedError, DiskFullError, StoreLockedError, TierstoreError, TruncatedError
from ..system.files import (
    FULL,
    RESTORE,
    TOLD,
    free_bytes,
    require_plain_file,
    sync_directory,
    translate_os_error,
    write_all,
)
from .meta import MAX_PAGES, META_READ_BYTES, parse_meta, repoint

if TYPE_CHECKING:
    from .snapshot import Snapshot

ROW_FILE_NAME: Final = "rows.lmdb"
SUPERBLOCK_NAME: Final = "rows.anchor"
FILE_NAMES: Final = (ROW_FILE_NAME, f"{ROW_FILE_NAME}-lock", SUPERBLOCK_NAME)
MAX_PAGE_BYTES: Final = 32768  # LMDB uses the system's page size up to this

_STAMP_BYTES: Final = 16
_CORRUPT: Final = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.BadTxnError,
    lmdb.PageFullError, lmdb.CursorFullError,
)  # fmt: skip


def rows_path(directory: Path) -> Path:
    return directory / ROW_FILE_NAME


def take_from_lower_layer(directory: Path) -> None:
    """Have an overlay copy the row file now, as an open for writing would, so that readers see what a writer writes."""
    with contextlib.suppress(OSError):  # it may not be ours to write to
        os.close(os.open(rows_path(directory), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))


def translate(error: lmdb.Error, path: Path) -> TierstoreError:
    if "already open in this process" in str(error):
        return StoreLockedError(
            f"{path}: LMDB has it open already in this process, or had it in one that this was forked from; open the "
            "store in a new process."
        )
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError):
        return DiskFullError(
            f"{path}: no row file may have more than {MAX_PAGES} pages, and this one is about to; the last commit is "
            "intact. Put some of the tables in another store."
        )
    full = isinstance(error, lmdb.DiskError) or code in FULL
    if not full and code == errno.EIO:  # LMDB's word for a write cut short, which a nearly full disk does
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_at_limit = limit != resource.RLIM_INFINITY and path.stat().st_size > limit - (1 << 20)
        full = is_at_limit or free_bytes(path.parent) < 1 << 20
    if full or code in TOLD:
        code = errno.ENOSPC if full else code
        return translate_os_error(OSError(code, os.strerror(code)), path)
    if isinstance(error, lmdb.PanicError):
        return TierstoreError(
            f"{path}: an earlier write failed; the last commit is intact: close the store and open it again."
        )
    if isinstance(error, _CORRUPT):
        return DamagedError(f"{path}: LMDB reports {error}. {RESTORE}")
    if code == errno.EIO:
        return TierstoreError(
            f"{path}: {error}; the last commit is intact. The system's log says what the device reports; if later "
            "calls fail too, close the store and open it again."
        )
    return TierstoreError(f"{path}: {error}")


def require_plain_files(directory: Path) -> None:
    """FormatError if one of the files of a store is there and is no plain file; nothing outside is read or written."""
    for name in FILE_NAMES:
        require_plain_file(directory / name)


def require_own_files(directory: Path) -> None:
    """TierstoreError if a file that is written in place is another store's, too, as in a copy by ``cp -al``."""
    for path in (directory / name for name in FILE_NAMES):
        if path.exists() and (links := path.stat().st_nlink) > 1:
            raise TierstoreError(
                f"{path} is a hard link, one of {links}: writing to it would change another store. Copy it by "
                'cp -a --reflink=auto or tierstore backup, and open the copy; mode="r" opens this one.'
            )


def open_environment(path: Path, map_size: int) -> "lmdb.Environment":
    """The file in LMDB's hands, for writing, with LMDB's own lock file. Readers need neither (``reader_locks.py``)."""
    try:
        return lmdb.open(
            os.fsencode(path),
            map_size=map_size,
            subdir=False,
            readonly=False,
            metasync=False,
            sync=False,  # superblock.py says when the file is synced, and why that is enough
            map_async=False,
            mode=0o666,
            create=False,
            readahead=False,
            writemap=False,  # a full disk would end the process with SIGBUS
            meminit=True,
            max_readers=126,
            max_dbs=0,
            max_spare_txns=0,
            lock=True,
            lib_version=0,  # LMDB 0.9: data version 1, which btree.py reads
        )
    except lmdb.Error as error:
        raise translate(error, path) from error


def create_rows_file(path: Path, records: dict[bytes, bytes], store_id: bytes) -> None:
    """Create the file with some records in it, all or nothing: LMDB creates a file before it writes to it, so it is
    written under another name first. The stamp is the store's id at the end of the first meta page, which LMDB leaves
    alone. The id that counts is a record in the tree; the stamp can be read before the tree can be trusted."""
    draft, draft_lock = path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.new-lock")
    from .mapped import map_length

    for stale in (draft, draft_lock):
        stale.unlink(missing_ok=True)
    environment = open_environment(draft, map_length(1))
    try:
        with environment.begin(write=True) as txn:
            for key, value in records.items():
                txn.put(key, value)
        environment.sync(True)
    except lmdb.Error as error:
        raise translate(error, path) from error
    finally:
        page_bytes = environment.stat()["psize"]
        environment.close()
    with draft.open("r+b", buffering=0) as file:
        write_all(file.fileno(), store_id, page_bytes - _STAMP_BYTES)
        os.fsync(file.fileno())
    os.rename(draft, path)
    draft_lock.unlink(missing_ok=True)
    sync_directory(path.parent)


def read_stamp(path: Path, page_bytes: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), _STAMP_BYTES, page_bytes - _STAMP_BYTES)


_PART_BYTES: Final = 32 << 20  # copied at a time; between two, progress shows and Ctrl-C is heeded
_NOT_SUPPORTED: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)


def copied_bytes(snapshot: "Snapshot") -> int:
    """Length of the copy. LMDB may leave the last pages of a file unwritten where they are free."""
    return min(snapshot.file_map.file_bytes(), (snapshot.meta.last_page + 1) * snapshot.page_bytes)


def copy_rows_file(snapshot: "Snapshot", path: Path, progress: Callable[[int, int], None]) -> None:
    """Copy into a new file, synced, while a writer goes on; ``progress(done_bytes, total_bytes)``.

    No page of the snapshot's tree is reused while it is open; others are free in it. Both meta pages of the copy lead
    to that tree: as transaction n, and as n - 1, which LMDB replaces next. DiskFullError, TierstoreError: the system
    refused. DamagedError: the source is not what was written. StoreReplacedError: it is not at its path any more.
    """
    snapshot.file_map.locks.require_in_place()
    source = os.open(snapshot.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        snapshot.file_map.locks.require_in_place()  # so it is the very file that the snapshot is of
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _copy(snapshot, source, target, progress)
        finally:
            os.close(target)
    except OSError as error:
        translated = translate_os_error(error, path)
        if isinstance(translated, DiskFullError):
            raise translated from error
        raise TierstoreError(f"{snapshot.path} could not be copied: {translated}") from error
    finally:
        os.close(source)


def _copy(snapshot: "Snapshot", source: int, target: int, progress: Callable[[int, int], None]) -> None:
    total, meta = copied_bytes(snapshot), snapshot.meta
    os.ftruncate(target, total)
    os.posix_fadvise(source, 0, total, os.POSIX_FADV_SEQUENTIAL)
    start = 0
    while start < total:
        count = _copy_part(source, target, start, min(_PART_BYTES, total - start))
        if not count:
            raise TruncatedError(f"{snapshot.path}: it ends at byte {start}, before its last page. {RESTORE}")
        start += count
        progress(start, total)
    for txn_id in (meta.txn_id - 1, meta.txn_id):
        place = txn_id % 2 * meta.page_bytes
        page = repoint(os.pread(source, META_READ_BYTES, place), meta, txn_id)
        if parse_meta(page) != meta._replace(txn_id=txn_id):
            raise DamagedError(f"{snapshot.path}: meta page {txn_id % 2} is damaged. {RESTORE}")
        write_all(target, page, place)
    os.fsync(target)
    progress(total, total)


def _copy_part(source: int, target: int, start: int, count: int) -> int:
    """Copy bytes to the same place in the target; returns how many, 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, count, start, start)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    part = os.pread(source, count, start)
    write_all(target, part, start)
    return len(part)
