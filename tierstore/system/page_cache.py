"""The operating system's page cache: put a file out of it, into it, and see how much of it is there."""

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def _check(status: int, call: str) -> None:
    if status:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def zap_maps(path: Path) -> int:
    """Unmap this process's present pages of its shared maps of ``path`` (they fault in again); bytes of those maps.

    A page that some map holds cannot leave the page cache. On a shared map of a file MADV_DONTNEED loses nothing.
    """
    size_bytes = 0
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ..(.)s \S+ \S+ \S+ +(.+)", line)
        if found and found[4] == str(path.resolve()):
            start, end = int(found[1], 16), int(found[2], 16)
            _check(_LIBC.madvise(start, end - start, mmap.MADV_DONTNEED), "madvise")
            size_bytes += end - start
    return size_bytes


def drop(path: Path) -> None:
    """Put the file out of the page cache; needs no privilege, but no other process may have it mapped."""
    zap_maps(path)
    with path.open("rb", buffering=0) as file:
        os.fdatasync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Read the whole file once, so that it is in the page cache as far as memory allows."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def resident_share(path: Path) -> float:
    """The share of the file's pages that are in the page cache, from 0 to 1 (mincore)."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        flags = np.empty(-(-size_bytes // mmap.PAGESIZE), np.uint8)
        _check(_LIBC.mincore(view.ctypes.data, size_bytes, flags.ctypes.data), "mincore")
        del view
    return float(np.mean(flags & 1))
