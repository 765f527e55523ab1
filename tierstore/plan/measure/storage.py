"""The SSD under a folder: reads past the page cache by how many are in flight, and writes that last."""

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

    _pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
else:
    _prototype = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64)
    _libc_pread = _prototype(("pread", ctypes.CDLL(None)))

    def _pread(*arguments: Any) -> Any:
        return _libc_pread(*map(int, arguments))


@kernel
def _read_each(descriptor: int, address: int, size_bytes: int, offsets: Int64s) -> int:
    """Read ``size_bytes`` at each offset to ``address``; how many came back whole."""
    whole = 0
    for index in range(offsets.shape[0]):
        if _pread(np.int32(descriptor), np.uintp(address), np.uintp(size_bytes), offsets[index]) == size_bytes:
            whole += 1
    return whole


class DirectReader:
    """Random direct reads of one file, ``depth`` in flight, each in a thread of its own.

    Args:
        block_bytes: of each read; a multiple of 4,096.

    Raises:
        OSError: the file system has no direct reads.
    """

    def __init__(self, path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> None:
        self.block_bytes = block_bytes
        self._path = path
        self._depth = depth
        self._blocks = path.stat().st_size // block_bytes
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            text = f"{path} cannot be read directly ({error.strerror}); use --dir on another file system"
            raise OSError(error.errno, text) from error
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
        whole = sum(each)
        if whole != len(offsets):
            raise OSError(f"{self._path}: {len(offsets) - whole} of {len(offsets)} direct reads failed")

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)


def direct_reader(path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> "closing[DirectReader]":
    """A reader, closed at the end."""
    return closing(DirectReader(path, depth, block_bytes=block_bytes))


def require_device(folder: Path) -> None:
    """ValueError if ``folder`` is none, or is on a file system that lives in memory."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; make it first, on the disk to be measured")
    number = folder.stat().st_dev
    device, kind = f"{os.major(number)}:{os.minor(number)}", ""
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            kind = rest.split()[0]
    if kind in _IN_MEMORY:
        raise ValueError(f"{folder} is on {kind}, which lives in memory; use --dir on the disk to be measured")


def measure_storage(folder: Path, *, seconds: float, file_bytes: int) -> Storage:
    """Write a file in ``folder``, read it, and remove it.

    Reads are of uniformly random places, each thread waiting for its own. The writes are those that make the file, each
    part synced. What a drive does after minutes of writing is not seen.

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
        written = _write_file(path, size_bytes // _LARGE_BYTES)
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
        write_bytes_per_s=written,
    )


def _write_file(path: Path, blocks: int) -> float:
    """Make a file of random blocks of 1 MiB; bytes written a second, synced: the median over its parts."""
    rates, generator = [], np.random.default_rng(0)
    with path.open("xb", buffering=0) as file:
        for part in np.array_split(np.arange(blocks), _FILE_PARTS):
            content = generator.bytes(len(part) * _LARGE_BYTES)
            began = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            rates.append(len(content) / (time.perf_counter() - began))
    return statistics.median(rates)


def _reads_per_s(path: Path, block_bytes: int, depth: int, seconds: float) -> float:
    generator = np.random.default_rng((block_bytes, depth))
    with direct_reader(path, depth, block_bytes=block_bytes) as reader:
        return rate_of(
            lambda count: reader.read(reader.random_offsets(generator, count)), seconds=seconds, first=4 * depth
        )
