"""A machine as a ``Host``: its memory, its cores and the SSD under a folder; and for people, what each figure means."""

import functools
import math
import mmap
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch
from numba.core import types
from torch.utils.benchmark import Timer

from ...kernels.arrays import Int64s
from ...kernels.jit import kernel
from ...kernels.threads import default_threads
from ...system.files import free_bytes, needing, output_errors
from ...system.sizes import format_size, machine_memory_bytes
from ..host import Host, Link, Memory, Processor, Storage
from ..parts.catalog import shown
from .loops import IDS, PASSES, ROWS, Lab, measure_costs

READ_BYTES: Final = 4096
_DEPTHS: Final = (1, 4, 16, 64)
_LARGE_BYTES, _LARGE_DEPTH, _FILE_PARTS = 1 << 20, 8, 8
_CALLS, _ENOUGH, _MOST_GROWTH = 5, 0.5, 16  # that count; of its time, at least; of reads, from call to call
_FILE_SHARE: Final = 0.1  # of what is free
_IN_MEMORY: Final = ("tmpfs", "ramfs", "rootfs")
_LEAST_SECONDS, _DEFAULT_SECONDS, _MOST_SECONDS = 1.0, 50.0, 3600.0
_LEAST_FILE_BYTES, _FILE_BYTES = 16 << 20, 1 << 30
_NETWORK: Final = Link(bytes_per_s=1.12e9, latency_us=30.0)
_COLD_SECONDS: Final = 0.25  # that a batch of cold reads may take
_CORES_SHARE, _SSD_SHARE = 0.15, 0.35  # of the time; loops over stores take the rest
_TABLE_BYTES, _MATRIX, _LOOKUPS = 1 << 30, 1536, 1 << 20
"""Of memory that is read, at most a quarter of what is free; rows and columns of a product; rows that are pooled."""
_ROW_BYTES: Final = 256
_BAG: Final = 32  # rows that are pooled together, so that little is written


def measure(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Callable[[str, float], None] | None = None
) -> Host:
    """Time this machine: memory, cores, the SSD under ``folder``, and tierstore's own work on a core.

    Prices, watts, GPUs, the network and what a drive may be written are not measured; ``Host.source`` says so. A file
    of up to 1 GiB and small stores are made in ``folder`` and removed.

    Args:
        folder: on the SSD that stores will be on.
        seconds: to spend, about; with fewer, figures are less sure.
        progress: called with what is measured next, and the share of all that is done, from 0 to 1.

    Raises:
        ValueError: no such folder, too little free, or a file system in memory.
        DiskFullError, TierstoreError: the system refuses, or the file system has no direct reads.
    """
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,g}")
    say = progress or (lambda _step, _share: None)
    folder = Path(folder)
    require_device(folder)
    threads, share = default_threads(), min(1.0, seconds / _DEFAULT_SECONDS)
    say("memory and cores", 0.0)
    memory, processor = measure_cores(seconds=seconds * _CORES_SHARE, threads=threads)
    with tempfile.TemporaryDirectory(prefix="tierstore-measure-", dir=folder, ignore_cleanup_errors=True) as name:
        say("SSD", 0.2)
        file_bytes = max(_LEAST_FILE_BYTES, int(_FILE_BYTES * share))
        drive = measure_storage(Path(name), seconds=seconds * _SSD_SHARE, file_bytes=file_bytes)
        lab = Lab(
            Path(name),
            processor,
            rows=max(20_000, int(ROWS * share)),
            ids=max(256, int(IDS * share)),
            cold_ids=max(64, int(min(IDS, drive.reads_per_s * _COLD_SECONDS) * share)),
            passes=max(3, int(PASSES * share)),
        )
        say("tierstore's own work", 0.55)
        costs = measure_costs(lab)
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return Host(
        name=platform.node() or "this machine",
        processor=processor,
        ddr=memory,
        network=_NETWORK,
        costs=costs,
        storage=(drive,),
        source=(
            f"tierstore plan measure on {model[1] if model else 'an unknown processor'}, {threads} cores, "
            f"{format_size(memory.capacity_bytes)}, {folder.resolve()}; network (10 Gb/s), drive writes a day, watts, "
            "prices and GPUs were not measured"
        ),
    )


def measure_cores(*, seconds: float, threads: int) -> tuple[Memory, Processor]:
    """Memory in order and by rows of 256 bytes at random, and float32 matrix products, on all threads."""
    rows = max(_BAG, min(_TABLE_BYTES, psutil.virtual_memory().available // 4) // _ROW_BYTES)
    table, left = torch.ones(rows, _ROW_BYTES // 4), torch.ones(_MATRIX, _MATRIX)
    ids = torch.randint(0, rows, (_LOOKUPS // _BAG, _BAG))

    def rate(work: Callable[..., object], *given: torch.Tensor, **options: Any) -> float:
        timer = Timer("work()", globals={"work": functools.partial(work, *given, **options)}, num_threads=threads)
        return 1 / timer.blocked_autorange(min_run_time=seconds / 3).median

    memory = Memory(
        capacity_bytes=float(machine_memory_bytes()),
        bytes_per_s=rate(torch.sum, table) * table.numel() * 4,
        row_bytes_per_s=rate(torch.nn.functional.embedding_bag, ids, table, mode="sum") * ids.numel() * _ROW_BYTES,
    )
    products = rate(torch.mm, left, left, out=torch.empty_like(left))
    return memory, Processor(cores=threads, flops=max(1.0, products * 2 * _MATRIX**3))


_pread: Any = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))


@kernel
def _read_each(descriptor: int, address: int, size_bytes: int, offsets: Int64s) -> int:
    """Read ``size_bytes`` at each offset to ``address``; how many came back whole."""
    whole = 0
    for index in range(offsets.shape[0]):
        if _pread(np.int32(descriptor), np.uintp(address), np.uintp(size_bytes), offsets[index]) == size_bytes:
            whole += 1
    return whole


class DirectReader(NamedTuple):
    """Random direct reads of one file, several in flight, each in a thread of its own; ``buffer``: the last block that
    each read."""

    path: Path
    block_bytes: int
    descriptor: int
    buffer: mmap.mmap
    addresses: Sequence[int]
    threads: ThreadPoolExecutor

    def random_offsets(self, generator: np.random.Generator, count: int) -> Int64s:
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
    """A reader of blocks of a multiple of 4,096 bytes, ``depth`` in flight. OSError: the file system has no direct
    reads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        text = f"{path} cannot be read directly ({error.strerror}); use --dir on another file system"
        raise OSError(error.errno, text) from error
    buffer = mmap.mmap(-1, depth * block_bytes)  # anonymous maps begin on a page, as direct reads want it
    first = np.frombuffer(buffer, np.uint8).ctypes.data
    addresses = range(first, first + depth * block_bytes, block_bytes)
    try:
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
    """Write a file in ``folder``, each part synced, read it at random places, and remove it. What a drive does after
    minutes of writing is not seen. ValueError: too little is free. TierstoreError: the file system has no direct
    reads, or refuses. OSError: it fails."""
    stat, free = os.statvfs(folder), free_bytes(folder)
    size_bytes = int(min(file_bytes, free * _FILE_SHARE)) // _LARGE_BYTES * _LARGE_BYTES
    if size_bytes < min(_LEAST_FILE_BYTES, file_bytes):
        raise ValueError(
            f"{folder}: {format_size(free)} are free, and a tenth of it is too little to measure with; "
            "free some space, or use --dir on another file system"
        )
    path, each = folder / "blocks", seconds / (len(_DEPTHS) + 1)
    with output_errors(path), needing("direct reads"):
        try:
            written = _write_file(path, size_bytes // _LARGE_BYTES)
            rates = [_reads_per_s(path, READ_BYTES, depth, each) for depth in _DEPTHS]
            largest = _reads_per_s(path, _LARGE_BYTES, _LARGE_DEPTH, each) * _LARGE_BYTES
        finally:
            path.unlink(missing_ok=True)
    return Storage(
        capacity_bytes=float(stat.f_blocks * stat.f_frsize),
        read_latency_us=1e6 * _DEPTHS[0] / rates[0],
        reads_per_s=max(rates),
        read_bytes_per_s=largest,
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
    """The median of five calls, after smaller ones that find how many reads fill a fifth of the time."""
    generator, count, rates = np.random.default_rng((block_bytes, depth)), 4 * depth, list[float]()
    with direct_reader(path, depth, block_bytes=block_bytes) as reader:
        while len(rates) < _CALLS:
            began = time.perf_counter()
            reader.read(reader.random_offsets(generator, count))
            share = max(time.perf_counter() - began, 1e-9) * _CALLS / seconds  # a coarse clock may not move
            if share >= _ENOUGH:
                rates.append(count * _CALLS / seconds / share)
            else:
                count = math.ceil(count * min(1 / share, _MOST_GROWTH))
    return statistics.median(rates)


def describe(host: Host) -> str:
    """Each figure with its name in the file and what it means."""
    parts: list[tuple[str, Any]] = [("cores", host.processor), ("memory", host.ddr)]
    parts += [*(("SSD", drive) for drive in host.storage), ("tierstore's own work, on one core", host.costs)]
    lines = [host.source]
    for title, part in parts:
        lines += ["", title]
        for each in fields(part):
            value, text = getattr(part, each.name), each.metadata.get("help")
            if text and value and each.name not in ("watts", "usd"):
                lines.append(f"  {each.name:22}{shown(each.name, value):>14}   {text}")
    return "\n".join(lines)
