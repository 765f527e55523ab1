"""Files in memory: mapped by the system's own calls, and in its page cache.

``mmap.mmap`` keeps a copy of the descriptor, and closes whatever has its number by then.
"""

import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED: Final = 0x10


def map_shared(descriptor: int, length_bytes: int, protection: int, *, offset: int = 0, at: int | None = None) -> int:
    """Map a part of an open file, shared. Returns the address: ``at``, where something may be mapped already, or one
    that the kernel chooses. OSError: the kernel refuses."""
    how = mmap.MAP_SHARED if at is None else mmap.MAP_SHARED | _MAP_FIXED
    address: int | None = _libc.mmap(at, length_bytes, protection, how, descriptor, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _refusal(f"cannot map {length_bytes} bytes of address space")
    return address


def unmap(address: int, length_bytes: int) -> None:
    _libc.munmap(address, length_bytes)


def _refusal(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def zap_maps(path: Path) -> int:
    """Unmap this process's present pages of its shared maps of ``path`` (they fault in again); bytes of those maps.

    A page that some map holds cannot leave the page cache. On a shared map of a file MADV_DONTNEED loses nothing.
    """
    size_bytes = 0
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ..(.)s \S+ \S+ \S+ +(.+)", line)
        if found and found[4] == str(path.resolve()):
            start, end = int(found[1], 16), int(found[2], 16)
            if _libc.madvise(start, end - start, mmap.MADV_DONTNEED):
                raise _refusal("madvise")
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
