"""A file seen as memory, and the system calls kernels make without the GIL, each with a twin in plain Python."""

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import JIT_ENABLED, inline, kernel
from ..system.files import translate_os_error
from ..system.page_cache import map_shared, unmap
from .reader_locks import FileLocks
from .sigbus import Guard

_MAP_NORESERVE: Final = 0x4000
_MADV_RANDOM: Final = 1
_MADV_DONTNEED: Final = 4
WILL_NEED: Final = np.int32(3)  # MADV_WILLNEED: start reading these pages from the device and return at once

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_COLLAPSE: Final = 25
_LEAST_BYTES: Final = 1 << 30  # of a map of a file that grows; a multiple of all page sizes

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


if JIT_ENABLED:
    from numba import types
    from numba.core import cgutils
    from numba.core.types import ExternalFunction
    from numba.extending import intrinsic

    _madvise: Any = ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))
    _clock_gettime: Any = ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
    _mincore: Any = ExternalFunction("mincore", types.int32(types.uintp, types.uintp, types.voidptr))
    _CLOCK_MONOTONIC: Final = np.int32(time.CLOCK_MONOTONIC)

    @inline
    def queue_read(address: int, size_bytes: int) -> None:
        """Start reading the pages of ``[address, address + size_bytes)``."""
        start = address & -mmap.PAGESIZE
        _madvise(np.uintp(start), np.uintp(address - start + size_bytes), WILL_NEED)

    @inline
    def is_resident(address: int, flag: NDArray[np.uint8]) -> bool:
        """Whether the system's page around the address, which may be larger than LMDB's, is in memory; ``flag`` is
        scratch, uint8 [1]."""
        status = _mincore(np.uintp(address & -mmap.PAGESIZE), np.uintp(1), flag.ctypes)
        return status == 0 and (flag[0] & 1) != 0  # type: ignore[no-any-return]

    @inline
    def clock_ns(timespec: NDArray[np.int64]) -> int:
        """Monotonic nanoseconds; ``timespec`` is scratch, int64 [2]."""
        _clock_gettime(_CLOCK_MONOTONIC, timespec.ctypes)
        return timespec[0] * 1_000_000_000 + timespec[1]  # type: ignore[no-any-return]

    @intrinsic
    def copy_words(typing_context: Any, target: Any, at: Any, source: Any, start: Any, count: Any) -> Any:  # noqa: ARG001
        """``target[at : at + count] = source[start : start + count]`` as one memcpy, unchecked. Its wide loads keep
        more rows in flight than a loop over words does: a store queue holds few stores."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target_data = context.make_array(signature.args[0])(context, builder, args[0]).data
            source_data = context.make_array(signature.args[2])(context, builder, args[2]).data
            to, come_from = builder.gep(target_data, [args[1]]), builder.gep(source_data, [args[3]])
            cgutils.raw_memcpy(builder, to, come_from, args[4], 8)
            return context.get_dummy_value()

        return types.void(target, at, source, start, count), generate

else:

    def queue_read(address: int, size_bytes: int) -> None:
        start = int(address) & -mmap.PAGESIZE
        _libc.madvise(start, int(address) - start + int(size_bytes), int(WILL_NEED))

    def is_resident(address: int, flag: NDArray[np.uint8]) -> bool:
        status = _libc.mincore(int(address) & -mmap.PAGESIZE, 1, flag.ctypes.data)
        return status == 0 and bool(flag[0] & 1)

    def clock_ns(timespec: NDArray[np.int64]) -> int:  # noqa: ARG001
        return time.monotonic_ns()

    def copy_words(target: Words, at: int, source: Words, start: int, count: int) -> None:
        target[at : at + count] = source[start : start + count]


@kernel
def queue_parts(address: int, starts: Int64s, stops: Int64s) -> None:
    """Start reading bytes ``[starts[i], stops[i])`` of the file mapped at ``address``."""
    for i in range(len(starts)):
        queue_read(address + starts[i], stops[i] - starts[i])


def zeros(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeros that take memory only where written: by pages of 4 KiB, also where the system would take huge ones."""
    size_bytes = length * np.dtype(dtype).itemsize
    if size_bytes < HUGE_PAGE_BYTES // 2:
        return np.zeros(length, dtype)
    buffer = mmap.mmap(-1, size_bytes + 2 * HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_NOHUGEPAGE)
    address = np.frombuffer(buffer, np.uint8, 1).ctypes.data
    return np.frombuffer(buffer, dtype, length, -address % HUGE_PAGE_BYTES)


def use_huge_pages(array: NDArray[Any], start: int, stop: int) -> None:
    """Have bytes ``[start, stop)`` of what ``zeros`` gave, multiples of 2 MiB, in huge pages: random access misses the
    TLB less. What is there is copied, in about 1 ms for 4 MiB; others may read and write meanwhile."""
    if array.nbytes < HUGE_PAGE_BYTES // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    stop = min(stop, -(-array.nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
        _libc.madvise(array.ctypes.data + start, stop - start, advice)


def map_length(size_bytes: int) -> int:
    """Address space for a file that has so many bytes and grows: the next power of two, at least ``_LEAST_BYTES``."""
    return max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length())


class FileMap:
    """A read-only shared map of a file: ``words`` (uint64) or ``halves`` (uint16), from ``address`` on. It may be
    longer than the file: readers compare with ``file_bytes()`` first. ``guard`` is asked before and after every read;
    pages that cannot be read show zeros. ``reaching`` makes a longer one for a file that grew; this one stays."""

    def __init__(self, path: os.PathLike[str], length_bytes: int, locks: FileLocks | None = None) -> None:
        self.path = path
        self._owns_locks = locks is None
        self.locks = FileLocks(path) if locks is None else locks
        self.length_bytes = -(-length_bytes // 65536) * 65536
        self._longer: FileMap | None = None
        self._growing = threading.RLock()
        with contextlib.ExitStack() as stack:
            if self._owns_locks:
                stack.callback(self.locks.close)
            self.address = address = self._map(None, 0, self.length_bytes)
            stack.callback(unmap, address, self.length_bytes)
            buffer = (ctypes.c_uint8 * self.length_bytes).from_address(address)
            self.words: Words = np.ctypeslib.as_array(buffer).view(np.uint64)
            self.words.flags.writeable = False
            self.halves: NDArray[np.uint16] = self.words.view(np.uint16)
            self.guard = Guard(path, self.locks.size_bytes, address, self.length_bytes, self._map)
            stack.pop_all()

    @classmethod
    def of_rows(cls, path: os.PathLike[str], size_bytes: int, locks: FileLocks) -> "FileMap":
        """A map that so many bytes fit, with ``rows``, for which several threads may ask at once. OSError: no address
        space is left. ClosedError: somebody closed the descriptor."""
        made = cls(path, map_length(size_bytes), locks)
        try:
            made.rows.file_bytes()  # was it the open file that was mapped?
        except BaseException:
            made.close()
            raise
        return made

    @functools.cached_property
    def rows(self) -> "FileMap":
        """Another map of the open file, with a guard of its own, to read rows through: a page of theirs that the
        device refuses does not disturb a thread that walks the tree meanwhile. Closed with this one."""
        return FileMap(self.path, self.length_bytes, self.locks)

    def reaching(self, size_bytes: int) -> "FileMap":
        """The map of the open file that so many bytes fit: this one, or a longer one that is closed with it.
        TierstoreError: no address space is left, or somebody closed the descriptor."""
        if size_bytes <= self.length_bytes:
            return self
        with self._growing:
            if self._longer is None:
                try:
                    self._longer = FileMap.of_rows(self.path, size_bytes, self.locks)
                except OSError as error:
                    raise translate_os_error(error, self.path) from error
                for old in (self, self.rows):  # their page tables are of no more use
                    _libc.madvise(old.address, old.length_bytes, _MADV_DONTNEED)
        return self._longer.reaching(size_bytes)

    def _map(self, at: int | None, offset: int, length_bytes: int) -> int:
        """Map a part in this process and not in forked ones: a map keeps its file open, with its locks."""
        try:
            address = map_shared(self.locks.descriptor, length_bytes, mmap.PROT_READ, offset=offset, at=at)
        except OSError as error:
            error.filename = str(self.path)
            raise
        for advice in (mmap.MADV_DONTFORK, _MADV_RANDOM):
            _libc.madvise(address, length_bytes, advice)
        return address

    def file_bytes(self) -> int:
        """Length of the file now, as far as it is mapped; ClosedError if somebody closed the descriptor."""
        return min(self.locks.size_bytes(), self.length_bytes)

    def tells_residency(self) -> bool:
        """Whether ``is_resident`` says the truth: the kernel tells only who could write to the file or owns it."""
        stat = os.fstat(self.locks.descriptor)
        return stat.st_uid == os.geteuid() or os.access(self.path, os.W_OK)

    def close(self) -> None:
        """Unmap. Any array still over ``words`` becomes a trap."""
        if len(self.words):
            empty = np.empty(0, np.uint64)
            self.words, self.halves = empty, empty.view(np.uint16)
            for other in (vars(self).get("rows"), self._longer):
                if other is not None:
                    other.close()
            self.guard.close()
            unmap(self.address, self.length_bytes)
            if self._owns_locks:
                self.locks.close()
