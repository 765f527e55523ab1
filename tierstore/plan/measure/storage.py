"""The SSD under a folder, past the page cache: reads by how many are under way, and writes that last.

Reads and writes are many at a time: one thread for each, in its own system call. They are also the limit that the
device sets, which tierstore's own reads are measured against.
"""

import ctypes
import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64s
from ...kernels.jit import JIT_ENABLED, kernel
from ...system.durable import free_bytes
from ...system.sizes import format_size
from ..host import Storage
from .machine import rate_of

READ_BYTES: Final = 4096
_PAGE_WORDS: Final = 512
"""A word in each 4 KiB that is written says where it lies, so that no device stores two pages as one."""
_DEPTHS: Final = (1, 4, 16, 64)
_LARGE_BYTES: Final = 1 << 20
_LARGE_DEPTH: Final = 8
_FILE_PARTS: Final = 8
_FILE_SHARE: Final = 0.1
"""Of what is free; the file of which blocks are read takes no more."""
_LEAST_FILE_BYTES: Final = 16 << 20
_IN_MEMORY: Final = ("tmpfs", "ramfs", "rootfs")

if JIT_ENABLED:
    from numba.core import types

    _CALL: Final[Any] = types.intp(types.intc, types.uintp, types.uintp, types.int64)
    _pread: Any = types.ExternalFunction("pread", _CALL)
    _pwrite: Any = types.ExternalFunction("pwrite", _CALL)
else:
    _prototype = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64)
    _libc_pread, _libc_pwrite = (_prototype((name, ctypes.CDLL(None))) for name in ("pread", "pwrite"))

    def _pread(*arguments: Any) -> Any:
        return _libc_pread(*map(int, arguments))

    def _pwrite(*arguments: Any) -> Any:
        return _libc_pwrite(*map(int, arguments))


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


def direct_reader(path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> "closing[DirectReader]":
    """A reader, closed at the end."""
    return closing(DirectReader(path, depth, block_bytes=block_bytes))


def require_device(folder: Path) -> None:
    """ValueError if ``folder`` is none, or is on a file system that lives in memory."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; make it first, on the disk to be measured")
    kind = _file_system(folder)
    if kind in _IN_MEMORY:
        raise ValueError(f"{folder} is on {kind}, which lives in memory; use --dir on the disk to be measured")


def _file_system(folder: Path) -> str:
    """Its type, as mount knows it; "" if that is not told."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            return rest.split()[0]
    return ""


def measure_storage(folder: Path, *, seconds: float, file_bytes: int) -> Storage:
    """Write a file in ``folder``, read it, and remove it.

    Reads are of uniformly random places, each thread waiting for its own. The writes are those that make the file,
    counted until the system says that they are where a power cut leaves them. What a drive does after minutes of
    writing is not seen.

    Args:
        seconds: to spend on it, about, without writing the file.
        file_bytes: size of the file; less where little is free.

    Raises:
        ValueError: too little is free. OSError: the file system has no direct reads, or fails.
    """
    stat, free = os.statvfs(folder), free_bytes(folder)
    size_bytes = int(min(file_bytes, free * _FILE_SHARE)) // _LARGE_BYTES * _LARGE_BYTES
    if size_bytes < min(_LEAST_FILE_BYTES, file_bytes):
        raise ValueError(
            f"{folder}: {format_size(free)} are free, and a tenth of it is too little to measure with; "
            "free some space, or use --dir on another file system"
        )
    path = folder / "blocks"
    try:
        large_writes = _write_file(path, size_bytes)
        each = seconds / (len(_DEPTHS) + 1)
        rates = [_reads_per_s(path, READ_BYTES, depth, each) for depth in _DEPTHS]
        large_reads = _reads_per_s(path, _LARGE_BYTES, _LARGE_DEPTH, each)
    finally:
        path.unlink(missing_ok=True)
    return Storage(
        capacity_bytes=float(stat.f_blocks * stat.f_frsize),
        read_latency_us=1e6 * _DEPTHS[0] / rates[0],
        reads_per_s=max(rates),
        read_bytes_per_s=large_reads * _LARGE_BYTES,
        write_bytes_per_s=large_writes * _LARGE_BYTES,
    )


def _write_file(path: Path, size_bytes: int) -> float:
    """Make the file; how many of its MiB were written a second: the median over its parts."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    rates = []
    with closing(DirectWriter(path, _LARGE_DEPTH, block_bytes=_LARGE_BYTES)) as writer:
        for part in np.array_split(np.arange(0, size_bytes, _LARGE_BYTES), _FILE_PARTS):
            began = time.perf_counter()
            writer.write(part)
            writer.sync()
            rates.append(len(part) / (time.perf_counter() - began))
    return statistics.median(rates)


def _reads_per_s(path: Path, block_bytes: int, depth: int, seconds: float) -> float:
    generator = np.random.default_rng((block_bytes, depth))
    with direct_reader(path, depth, block_bytes=block_bytes) as reader:
        return rate_of(
            lambda count: reader.read(reader.random_offsets(generator, count)), seconds=seconds, first=4 * depth
        )
