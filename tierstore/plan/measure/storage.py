"""The SSD under a folder: reads past the page cache by how many are in flight, and writes that last."""

import ctypes
import functools
import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from ...kernels.arrays import Int64s
from ...kernels.jit import JIT_ENABLED, kernel
from ...system.durable import free_bytes
from ...system.sizes import format_size
from ..host import Storage
from .machine import rate_of

READ_BYTES: Final = 4096
_DEPTHS: Final = (1, 4, 16, 64)
_LARGE_BYTES, _LARGE_DEPTH = 1 << 20, 8
_FILE_PARTS: Final = 8
_FILE_SHARE: Final = 0.1
"""Of what is free; the file of which blocks are read takes no more."""
_LEAST_FILE_BYTES: Final = 16 << 20
_IN_MEMORY: Final = ("tmpfs", "ramfs", "rootfs")

if JIT_ENABLED:
    from numba.core import types

    _pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
else:

    def _pread(descriptor: Any, address: Any, size_bytes: Any, offset: Any) -> Any:
        return os.preadv(int(descriptor), [(ctypes.c_char * int(size_bytes)).from_address(int(address))], int(offset))


@kernel
def _read_each(descriptor: int, address: int, size_bytes: int, offsets: Int64s) -> int:
    """Read ``size_bytes`` at each offset to ``address``; how many came back whole."""
    whole = 0
    for index in range(offsets.shape[0]):
        if _pread(np.int32(descriptor), np.uintp(address), np.uintp(size_bytes), offsets[index]) == size_bytes:
            whole += 1
    return whole


class DirectReader(NamedTuple):
    """Random direct reads of one file, several in flight, each in a thread of its own."""

    path: Path
    block_bytes: int
    descriptor: int
    buffer: mmap.mmap
    """A block of each thread: the last one that it read."""
    addresses: Sequence[int]
    threads: ThreadPoolExecutor

    def random_offsets(self, generator: np.random.Generator, count: int) -> Int64s:
        """int64 [count]: of blocks at random."""
        return generator.integers(0, self.path.stat().st_size // self.block_bytes, count) * self.block_bytes

    def read(self, offsets: Int64s) -> None:
        """Read a block at each offset and return when all have come."""
        parts = np.array_split(offsets, len(self.addresses))
        read = functools.partial(_read_each, self.descriptor)
        whole = sum(self.threads.map(read, self.addresses, [self.block_bytes] * len(parts), parts))
        if whole != len(offsets):
            raise OSError(f"{self.path}: {len(offsets) - whole} of {len(offsets)} direct reads failed")


@contextmanager
def direct_reader(path: Path, depth: int, *, block_bytes: int = READ_BYTES) -> Iterator[DirectReader]:
    """A reader of blocks of a multiple of 4,096 bytes, ``depth`` in flight; closed at the end. OSError: the file system
    has no direct reads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        text = f"{path} cannot be read directly ({error.strerror}); use --dir on another file system"
        raise OSError(error.errno, text) from error
    try:
        buffer = mmap.mmap(-1, depth * block_bytes)  # anonymous maps begin on a page, as direct reads want it
        first = np.frombuffer(buffer, np.uint8).ctypes.data
        addresses = range(first, first + depth * block_bytes, block_bytes)
        with ThreadPoolExecutor(depth, "direct-read") as threads:
            reader = DirectReader(path, block_bytes, descriptor, buffer, addresses, threads)
            reader.read(np.zeros(depth, np.int64))
            yield reader
    finally:
        os.close(descriptor)


def require_device(folder: Path) -> None:
    """ValueError if ``folder`` is none, or is on a file system that lives in memory."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; make it first, on the disk to be measured")
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype
    if kind in _IN_MEMORY:
        raise ValueError(f"{folder} is on {kind}, which lives in memory; use --dir on the disk to be measured")


def measure_storage(folder: Path, *, seconds: float, file_bytes: int) -> Storage:
    """Write a file in ``folder``, read it, and remove it.

    Reads are of uniformly random places, each thread waiting for its own. The writes are those that make the file,
    each part synced. What a drive does after minutes of writing is not seen. ValueError: too little is free.
    OSError: the file system has no direct reads, or fails.
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
