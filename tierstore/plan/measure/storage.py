"""The SSD under a folder, past the page cache: reads by size and by how many are under way, and writes that last."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...system.sizes import format_size
from ..host import Storage
from .direct import READ_BYTES, DirectWriter, direct_reader
from .timing import rate_of

__all__ = ["BLOCK_BYTES", "DEPTHS", "ReadRate", "StorageFigures", "measure_storage", "require_device"]

DEPTHS: Final = (1, 4, 16, 64)
BLOCK_BYTES: Final = (READ_BYTES, 4 * READ_BYTES, 16 * READ_BYTES)
_LARGE_BYTES: Final = 1 << 20
_LARGE_DEPTH: Final = 8
_FILE_PARTS: Final = 8
_FILE_SHARE: Final = 0.1
"""Of what is free; the file of which blocks are read takes no more."""
_LEAST_FILE_BYTES: Final = 16 << 20
_IN_MEMORY: Final = ("tmpfs", "ramfs", "rootfs")


class ReadRate(NamedTuple):
    """Reads at random, so many under way."""

    block_bytes: int
    depth: int
    reads_per_s: float

    @property
    def latency_us(self) -> float:
        """Mean time of a read, waiting for others included (Little's law: reads under way over reads a second)."""
        return self.depth / self.reads_per_s * 1e6


class StorageFigures(NamedTuple):
    storage: Storage
    reads: tuple[ReadRate, ...]


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
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            return rest.split()[0]
    return ""


def measure_storage(folder: Path, *, seconds: float, file_bytes: int) -> StorageFigures:
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
    stat = os.statvfs(folder)
    free_bytes = stat.f_bavail * stat.f_frsize
    size_bytes = min(file_bytes, int(free_bytes * _FILE_SHARE)) // _LARGE_BYTES * _LARGE_BYTES
    if size_bytes < min(_LEAST_FILE_BYTES, file_bytes):
        raise ValueError(
            f"{folder}: {format_size(free_bytes)} are free, and a tenth of it is too little to measure with; "
            "free some space, or use --dir on another file system"
        )
    path = folder / "blocks"
    try:
        large_writes = _write_file(path, size_bytes)
        each = seconds / (len(DEPTHS) * len(BLOCK_BYTES) + 1)
        reads = tuple(_reads(path, size, depth, each) for size in BLOCK_BYTES for depth in DEPTHS)
        large_reads = _reads(path, _LARGE_BYTES, _LARGE_DEPTH, each)
    finally:
        path.unlink(missing_ok=True)
    small = [read for read in reads if read.block_bytes == READ_BYTES]
    found = Storage(
        capacity_bytes=float(stat.f_blocks * stat.f_frsize),
        read_latency_us=small[0].latency_us,
        reads_per_s=max(read.reads_per_s for read in small),
        read_bytes_per_s=large_reads.reads_per_s * _LARGE_BYTES,
        write_bytes_per_s=large_writes * _LARGE_BYTES,
    )
    return StorageFigures(found, reads)


def _write_file(path: Path, size_bytes: int) -> float:
    """Make the file; how many of its MiB were written a second: the median over its parts."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    rates = []
    with _writer(path, _LARGE_DEPTH, _LARGE_BYTES) as writer:
        for part in np.array_split(np.arange(0, size_bytes, _LARGE_BYTES), _FILE_PARTS):
            began = time.perf_counter()
            writer.write(part)
            writer.sync()
            rates.append(len(part) / (time.perf_counter() - began))
    return statistics.median(rates)


@contextmanager
def _writer(path: Path, depth: int, block_bytes: int) -> Iterator[DirectWriter]:
    writer = DirectWriter(path, depth, block_bytes=block_bytes)
    try:
        yield writer
    finally:
        writer.close()


def _reads(path: Path, block_bytes: int, depth: int, seconds: float) -> ReadRate:
    generator = np.random.default_rng((block_bytes, depth))
    with direct_reader(path, depth, block_bytes=block_bytes) as reader:
        rate = rate_of(
            lambda count: reader.read(reader.random_offsets(generator, count)), seconds=seconds, first=4 * depth
        )
    return ReadRate(block_bytes, depth, rate)
