"""Reads and writes of a file past the page cache, many at a time: one thread for each, in its own system call.

The limit that the device sets, which tierstore's own reads are measured against.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64s
from ...kernels.jit import JIT_ENABLED, kernel

__all__ = ["READ_BYTES", "DirectReader", "DirectWriter", "direct_reader"]


READ_BYTES: Final = 4096
_PAGE_WORDS: Final = 512
"""A word in each 4 KiB that is written says where it lies, so that no device stores two pages as one."""

if JIT_ENABLED:
    from numba.core import types

    _CALL: Final[Any] = types.intp(types.intc, types.uintp, types.uintp, types.int64)
    _pread: Any = types.ExternalFunction("pread", _CALL)
    _pwrite: Any = types.ExternalFunction("pwrite", _CALL)
else:
    _libc: Final = ctypes.CDLL(None)
    for _call in (_libc.pread, _libc.pwrite):
        _call.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64]
        _call.restype = ctypes.c_ssize_t

    def _pread(descriptor: int, address: int, size_bytes: int, offset: int) -> int:
        return int(_libc.pread(int(descriptor), int(address), int(size_bytes), int(offset)))

    def _pwrite(descriptor: int, address: int, size_bytes: int, offset: int) -> int:
        return int(_libc.pwrite(int(descriptor), int(address), int(size_bytes), int(offset)))


@kernel
def _read_each(descriptor: int, address: int, size_bytes: int, offsets: Int64s) -> int:
    """Read ``size_bytes`` at each offset to ``address``; how many came back whole."""
    whole = 0
    for index in range(offsets.shape[0]):
        if _pread(np.int32(descriptor), np.uintp(address), np.uintp(size_bytes), offsets[index]) == size_bytes:
            whole += 1
    return whole


@kernel
def _write_each(descriptor: int, address: int, words: Int64s, offsets: Int64s) -> int:
    """Write ``words``, which lie at ``address``, at each offset; how many went whole."""
    whole = 0
    size_bytes = words.shape[0] * 8
    for index in range(offsets.shape[0]):
        for word in range(0, words.shape[0], _PAGE_WORDS):
            words[word] = offsets[index] + word * 8
        if _pwrite(np.int32(descriptor), np.uintp(address), np.uintp(size_bytes), offsets[index]) == size_bytes:
            whole += 1
    return whole


class DirectReader:
    """Random direct reads of one file, ``depth`` at a time.

    Args:
        block_bytes: of each read; a multiple of 4,096.

    Raises:
        OSError: the file system knows no direct reads.
    """

    _mode = os.O_RDONLY

    def __init__(self, path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> None:
        self.block_bytes = block_bytes
        self._path = path
        self._depth = depth
        self._blocks = path.stat().st_size // block_bytes
        self._descriptor = self._open()
        # Anonymous maps begin on a page, as direct reads want it.
        self.buffer = mmap.mmap(-1, depth * block_bytes)
        first = np.frombuffer(self.buffer, np.uint8).ctypes.data
        self._addresses = range(first, first + depth * block_bytes, block_bytes)
        self._threads = ThreadPoolExecutor(depth, "direct-read")
        try:
            self.read(np.zeros(depth, np.int64))
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        try:
            return os.open(self._path, self._mode | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._path} cannot be read directly ({error.strerror}); use --dir on another file system",
            ) from error

    def random_offsets(self, generator: np.random.Generator, count: int) -> Int64s:
        """int64 [count]: of blocks at random."""
        return generator.integers(0, self._blocks, count) * self.block_bytes

    def read(self, offsets: Int64s) -> None:
        """Read a block at each offset and return when all have come."""
        depth = self._depth
        parts = np.array_split(offsets, depth)
        each = self._threads.map(
            _read_each, [self._descriptor] * depth, self._addresses, [self.block_bytes] * depth, parts
        )
        self._require_whole(sum(each), offsets, "reads")

    def _require_whole(self, whole: int, offsets: Int64s, what: str) -> None:
        if whole != len(offsets):
            raise OSError(f"{self._path}: {len(offsets) - whole} of {len(offsets)} direct {what} failed")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)


class DirectWriter(DirectReader):
    """The same, and writes over what the file holds: bytes that no device can make fewer."""

    _mode = os.O_RDWR

    def __init__(self, path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> None:
        super().__init__(path, depth, block_bytes=block_bytes)
        words = np.frombuffer(self.buffer, np.int64)
        words[:] = np.random.default_rng(depth).integers(0, 1 << 62, len(words))
        self._blocks_of_words = np.split(words, depth)

    def write(self, offsets: Int64s) -> None:
        """Write a block at each offset and return when the device has taken all; ``sync`` makes them last."""
        depth = self._depth
        parts = np.array_split(offsets, depth)
        each = self._threads.map(_write_each, [self._descriptor] * depth, self._addresses, self._blocks_of_words, parts)
        self._require_whole(sum(each), offsets, "writes")

    def sync(self) -> None:
        """Wait until what was written is where a power cut leaves it."""
        os.fsync(self._descriptor)


@contextmanager
def direct_reader(path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> Iterator[DirectReader]:
    """A reader, closed at the end."""
    reader = DirectReader(path, depth, block_bytes=block_bytes)
    try:
        yield reader
    finally:
        reader.close()
