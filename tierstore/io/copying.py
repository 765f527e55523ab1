"""A copy of the row file as one snapshot shows it, made from end to end while a writer goes on.

No page of a snapshot's tree is reused while the snapshot is open, so its pages may be copied in any order and at any
pace. What the copy has of other pages is of no use and of no harm: in that tree they are free. Only the meta pages, the
first two, change meanwhile. In the copy both lead to the snapshot's tree: that of transaction n, and the other as
n - 1, so that LMDB's next transaction, n + 1, replaces the latter.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..errors import DamagedError, DiskFullError, TierstoreError, TruncatedError
from ..system.durable import write_all
from ..system.oserrors import RESTORE, translate_os_error
from .btree import META_READ_BYTES, parse_meta, repoint
from .snapshot import Snapshot

_PART_BYTES: Final = 32 << 20
"""Copied at a time; between two, progress shows and Ctrl-C is heeded."""
_NOT_SUPPORTED: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)


def copied_bytes(snapshot: Snapshot) -> int:
    """Length of the copy. LMDB may leave the last pages of a file unwritten where they are free."""
    return min(snapshot.file_map.file_bytes(), (snapshot.meta.last_page + 1) * snapshot.page_bytes)


def copy_rows_file(snapshot: Snapshot, path: Path, progress: Callable[[int, int], None]) -> None:
    """Copy into a new file, synced; ``progress(done_bytes, total_bytes)``. The file system may have both share blocks.

    Raises:
        DiskFullError, TierstoreError: the system refused. DamagedError: the source is not what was written.
        StoreReplacedError: it is not at its path any more.
    """
    snapshot.file_map.require_in_place()
    source = os.open(snapshot.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        snapshot.file_map.require_in_place()  # so it is the very file that the snapshot is of
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _copy(snapshot, source, target, progress)
        finally:
            os.close(target)
    except OSError as error:
        told = translate_os_error(error, path)
        if isinstance(told, DiskFullError):
            raise told from error
        raise TierstoreError(f"{snapshot.path} could not be copied to {path}: {error.strerror}") from error
    finally:
        os.close(source)


def _copy(snapshot: Snapshot, source: int, target: int, progress: Callable[[int, int], None]) -> None:
    total = copied_bytes(snapshot)
    os.ftruncate(target, total)
    os.posix_fadvise(source, 0, total, os.POSIX_FADV_SEQUENTIAL)
    for start, stop in _stretches(source, total):
        while start < stop:
            count = _copy_part(source, target, start, min(_PART_BYTES, stop - start))
            if not count:
                raise TruncatedError(f"{snapshot.path}: it ends at byte {start}, before its last page. {RESTORE}")
            start += count
            progress(start, total)
    _write_metas(snapshot, source, target)
    os.fsync(target)
    progress(total, total)


def _stretches(descriptor: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a file has data: the holes of the source are holes of the copy."""
    stop = 0
    while stop < end:
        try:
            start = os.lseek(descriptor, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(stop, end)


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


def _write_metas(snapshot: Snapshot, source: int, target: int) -> None:
    meta = snapshot.meta
    for txn_id in (meta.txn_id - 1, meta.txn_id):
        place = txn_id % 2 * meta.page_bytes
        page = repoint(os.pread(source, META_READ_BYTES, place), meta, txn_id)
        if parse_meta(page) != meta._replace(txn_id=txn_id):
            raise DamagedError(f"{snapshot.path}: meta page {txn_id % 2} is damaged. {RESTORE}")
        write_all(target, page, place)
