"""Files mapped by the system's own calls: ``mmap.mmap`` keeps a copy of the descriptor, and closes whatever has its
number by then."""

import ctypes
import mmap
import os
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED: Final = 0x10


def map_shared(descriptor: int, length_bytes: int, protection: int, *, offset: int = 0, at: int | None = None) -> int:
    """Map a part of an open file, shared. Returns the address: ``at``, where something may be mapped already, or one
    that the kernel chooses. OSError: the kernel refuses."""
    how = mmap.MAP_SHARED if at is None else mmap.MAP_SHARED | _MAP_FIXED
    address: int | None = _libc.mmap(at, length_bytes, protection, how, descriptor, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {length_bytes} bytes of address space: {os.strerror(error)}")
    return address


def unmap(address: int, length_bytes: int) -> None:
    _libc.munmap(address, length_bytes)
