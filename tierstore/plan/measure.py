"""A machine as a ``Host``: its memory, its cores, the SSD under a folder, and tierstore's own work on a core.

tierstore's own work is timed by a loop for each cost over small stores, chosen so that the cost takes much of it. Loops
over stores are on one core, in the process's own time, so neither other processes nor waits for a device are in them. A
dense model runs on all cores, by the clock.
"""

import contextlib
import functools
import math
import mmap
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch
from numba.core import types
from torch import Tensor, nn
from torch.utils.benchmark import Timer, set_torch_threads

from .. import optim
from ..config import TableConfig
from ..dist.placement.costs import solve_nonnegative
from ..io.files import ROW_FILE_NAME
from ..io.meta import parse_meta
from ..io.superblock import read_metas
from ..kernels.arrays import Float64s, Int64s
from ..kernels.jit import FIRST_USE, kernel
from ..kernels.threads import default_threads
from ..layout import RowLayout
from ..models import DLRM
from ..nn.collection import TieredEmbeddingBagCollection
from ..nn.jagged import KeyedJaggedTensor
from ..store import Store, open_store
from ..system import page_cache
from ..system.files import free_bytes, needing, output_errors
from ..system.sizes import format_size, machine_memory_bytes
from .host import TRAINING_FLOPS, Host, Link, Memory, Processor, SoftwareCosts, Storage
from .workload import dlrm_work

__all__ = ["READ_BYTES", "DirectReader", "direct_reader", "measure", "page_cache"]

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

_ROWS, _IDS, _PASSES = 200_000, 4096, 10  # of a lab with all the time that it wants
_NARROW, _WIDE = 16, 128
_ROW_EXTRA_BYTES, _STAGING_BYTES, _SLACK = 60, 512 << 10, 1.2
"""Of a budget: what a cached row takes besides itself, what a store takes at least, and an eighth for transactions."""
_CHUNK, _BATCHES, _MISS_PART = 100_000, 8, 8  # where batches miss, the cache holds one row in _MISS_PART
_WRITTEN_BEFORE, _WRITTEN = 1 / 4, 1 / 2  # of the rows: so few that no space has to be won back
_DENSE_TABLES, _DENSE_DIM, _DENSE_SAMPLES = 8, 64, (64, 2048)
_DENSE: Final[dict[str, Any]] = {
    "num_dense": 13, "bottom_mlp": (64,), "top_mlp": (64,), "interaction": "dot", "cross_layers": 1, "cross_rank": 0,
}  # fmt: skip


def measure(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Callable[[str, float], None] | None = None
) -> Host:
    """Time this machine: memory, cores, the SSD under ``folder``, and tierstore's own work on a core, in about so many
    seconds; with fewer, figures are less sure. Prices, watts, GPUs, the network and what a drive may be written are not
    measured; ``Host.source`` says so. A file of up to 1 GiB and small stores are made in ``folder`` and removed.

    Args:
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
            rows=max(20_000, int(_ROWS * share)),
            ids=max(256, int(_IDS * share)),
            cold_ids=max(64, int(min(_IDS, drive.reads_per_s * _COLD_SECONDS) * share)),
            passes=max(3, int(_PASSES * share)),
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


@contextlib.contextmanager
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
    """Write a file in ``folder``, each part synced, read it at random places, and remove it. Minutes of writing are not
    seen. ValueError: too little is free. TierstoreError: the file system has no direct reads, or refuses."""
    stat, free = os.statvfs(folder), free_bytes(folder)
    size_bytes = int(min(file_bytes, free * _FILE_SHARE)) // _LARGE_BYTES * _LARGE_BYTES
    if size_bytes < min(_LEAST_FILE_BYTES, file_bytes):
        raise ValueError(
            f"{folder}: {format_size(free)} are free, and a tenth of it is too little to measure with; "
            "free some space, or use --dir on another file system"
        )
    path, each = folder / "blocks", seconds / (len(_DEPTHS) + 1)
    written, generator = list[float](), np.random.default_rng(0)
    with output_errors(path), needing("direct reads"):
        try:
            with path.open("xb", buffering=0) as file:
                for part in np.array_split(np.arange(size_bytes // _LARGE_BYTES), _FILE_PARTS):
                    content = generator.bytes(len(part) * _LARGE_BYTES)
                    began = time.perf_counter()
                    file.write(content)
                    os.fsync(file.fileno())
                    written.append(len(content) / (time.perf_counter() - began))
            rates = [_reads_per_s(path, READ_BYTES, depth, each) for depth in _DEPTHS]
            largest = _reads_per_s(path, _LARGE_BYTES, _LARGE_DEPTH, each) * _LARGE_BYTES
        finally:
            path.unlink(missing_ok=True)
    return Storage(
        capacity_bytes=float(stat.f_blocks * stat.f_frsize),
        read_latency_us=1e6 * _DEPTHS[0] / rates[0],
        reads_per_s=max(rates),
        read_bytes_per_s=largest,
        write_bytes_per_s=statistics.median(written),
    )


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


class Lab(NamedTuple):
    """How much is done, and where."""

    folder: Path
    processor: Processor
    rows: int
    ids: int
    cold_ids: int
    passes: int


class _Loop(NamedTuple):
    ns: float  # of a batch
    explained: Callable[[SoftwareCosts], float]  # how many of them some costs explain


def measure_costs(lab: Lab) -> SoftwareCosts:
    """Of all loops, on stores in the lab's folder; what the costs before explain is taken off."""
    costs, nothing = SoftwareCosts(), SoftwareCosts()
    for names, makers in _LOOPS.items():
        with set_torch_threads(1):
            loops = [make(lab) for make in makers]
        ones = [SoftwareCosts(**{name: 1.0}) for name in names]
        work = [[(loop.explained(one) - loop.explained(nothing)) / loop.ns for one in ones] for loop in loops]
        left = [max(0.0, 1 - loop.explained(costs) / loop.ns) for loop in loops]
        found = solve_nonnegative(np.array(work), np.array(left)).tolist()  # relative errors count
        costs = replace(costs, **dict(zip(names, found, strict=True)))
    return costs


class _Subject(NamedTuple):
    """An open store of one table, its file, and the module over it."""

    store: Store
    file: Path
    module: TieredEmbeddingBagCollection
    layout: RowLayout
    generator: np.random.Generator

    def batches(self, number: int, ids: int) -> list[KeyedJaggedTensor]:
        """Of any rows, one id a bag."""
        drawn = self.generator.integers(0, self.store["t0"].config.num_embeddings, (number, ids))
        return [KeyedJaggedTensor(["f0"], torch.from_numpy(each), offsets=torch.arange(ids + 1)) for each in drawn]

    def run(self, batch: KeyedJaggedTensor, *, is_training: bool) -> None:
        with torch.set_grad_enabled(is_training):
            pooled: Tensor = self.module(batch).values()
        if is_training:
            pooled.backward(torch.full_like(pooled, 1e-3))  # type: ignore[no-untyped-call]

    def timed(
        self,
        batches: list[KeyedJaggedTensor],
        *,
        is_training: bool = False,
        is_cold: bool = False,
        middle: Callable[[Sequence[float]], float] = statistics.median,
    ) -> _Loop:
        """``is_cold``: pages come from the device, else from the system's page cache. Batches that compiled a kernel do
        not count."""

        def done() -> Float64s:
            """Rows read from SSD, pages read for them, rows written, and transactions."""
            ssd, size = self.store.stats().ssd, self.layout.page_bytes
            counts = ssd.lookups, ssd.bytes_read / size, ssd.rows_written, transactions_in(self.file, size)
            return np.array(counts, np.float64)

        taken, before = list[float](), done()
        for batch in batches:
            if is_cold:
                page_cache.drop(self.file)
            began, compiled = time.process_time(), FIRST_USE.compiled
            self.run(batch, is_training=is_training)
            if compiled == FIRST_USE.compiled:
                taken.append(time.process_time() - began)
        read, pages, written, transactions = ((done() - before) / len(batches)).tolist()
        rows = statistics.fmean(len(np.unique(batch.values().numpy())) for batch in batches)
        ids = float(batches[0].values().numel())
        amounts: dict[str, Any] = {"ids": ids, "rows": rows, "bags": ids, "layout": self.layout}
        ddr = self.store.stats().ddr

        def explained(costs: SoftwareCosts) -> float:
            ns = 1e3 * costs.batch_us * (TRAINING_FLOPS if is_training else 1) + costs.lookup_ns(**amounts)
            ns += costs.update_ns(**amounts) if is_training else 0.0
            if ddr.capacity_rows < self.store["t0"].config.num_embeddings:
                ns += costs.admission_ns(ids=ids, rows=rows) + read * costs.miss_row_ns(self.layout)
            ns += pages * costs.read_ns if is_cold else 0.0
            ns += written * costs.append_row_ns(self.layout) + 1e3 * transactions * costs.transaction_us
            return float(ns)

        return _Loop(1e9 * middle(taken), explained)


@contextlib.contextmanager
def _opened(lab: Lab, dim: int, cached_rows: float) -> Iterator[_Subject]:
    """A store of rows that were all written, with a cache of about so many; as it was made."""
    path, layout = lab.folder / f"store-{dim}", RowLayout(dim=dim, state_dim=1)
    if not path.exists():
        config = TableConfig(
            name="t0", num_embeddings=lab.rows, embedding_dim=dim, feature_names=("f0",), pooling="sum",
            optimizer=optim.RowWiseAdagrad(lr=0.01),
        )  # fmt: skip
        with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
            table = store.create_table(config)
            for ids in torch.split(torch.arange(lab.rows), _CHUNK):
                table.write(ids, torch.full((len(ids), dim), 0.01))
            store.commit()
    page_cache.warm(path / ROW_FILE_NAME)
    ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _ROW_EXTRA_BYTES) * _SLACK)
    with open_store(path, mode="w", ddr=ddr, threads=1) as store:
        module, generator = TieredEmbeddingBagCollection(store), np.random.default_rng(1)
        yield _Subject(store, path / ROW_FILE_NAME, module, layout, generator)
        store.rollback(store.version)


def transactions_in(path: Path, page_bytes: int) -> int:
    """Ever made in a store's file, by the newer of its two meta pages."""
    return max(meta.txn_id for meta in map(parse_meta, read_metas(path, page_bytes)) if not isinstance(meta, str))


def _in_memory(lab: Lab, *, dim: int, ids: int, is_training: bool) -> _Loop:
    """All rows cached."""
    with _opened(lab, dim, 2 * lab.rows) as subject:
        for rows in torch.split(torch.arange(lab.rows), _CHUNK):
            subject.store["t0"].read(rows)
        batches = subject.batches(_BATCHES, min(ids, lab.ids))
        subject.timed(batches, is_training=is_training)
        return subject.timed(batches * lab.passes, is_training=is_training)


def _misses(lab: Lab, *, is_cold: bool) -> _Loop:
    """Lookups of rows that are not cached; pages from the device in batches that a slow one reads in time."""
    with _opened(lab, _WIDE, lab.rows / _MISS_PART) as subject:
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.run(*subject.batches(1, lab.ids), is_training=False)
        amount = (_BATCHES, lab.cold_ids) if is_cold else (_BATCHES * lab.passes, lab.ids)
        return subject.timed(subject.batches(*amount), is_cold=is_cold)


def _writes(lab: Lab, *, dim: int, part: int) -> _Loop:
    """Training steps that evict as many dirty rows as they fetch. The cache holds one row of ``part``, which decides
    how many rows a transaction has."""
    count = max(8, min(lab.ids, lab.rows // part) // 2)
    with _opened(lab, dim, lab.rows // part) as subject:
        while subject.store.stats().ssd.rows_written < _WRITTEN_BEFORE * lab.rows:
            subject.run(*subject.batches(1, count), is_training=True)
        batches = subject.batches(max(1, int(_WRITTEN * lab.rows) // count), count)
        return subject.timed(batches, is_training=True, middle=statistics.fmean)


def _dense(lab: Lab, *, samples: int) -> _Loop:
    """Training steps of a small dense model on all cores: the fastest, as other processes use the cores too."""
    model = DLRM(nn.Identity(), num_features=_DENSE_TABLES, embedding_dim=_DENSE_DIM, **_DENSE)
    rule, dense = torch.optim.SGD(model.parameters(), lr=0.01), torch.rand(samples, _DENSE["num_dense"])
    pooled = torch.rand(samples, _DENSE_TABLES * _DENSE_DIM, requires_grad=True)

    def step() -> float:
        began = time.perf_counter()
        rule.zero_grad()
        model.dense_part(dense, pooled).sum().backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None
        return 1e9 * (time.perf_counter() - began)

    dense_work, cores = dlrm_work([_DENSE_DIM] * _DENSE_TABLES, **_DENSE), lab.processor.cores
    flops_ns = 1e9 * TRAINING_FLOPS * samples * dense_work.dense_flops / lab.processor.flops
    amounts: dict[str, Any] = {"samples": samples, "threads": cores, "is_training": True}
    with set_torch_threads(cores):
        fastest = min(step() for _ in range(3 + 3 * lab.passes))
    return _Loop(fastest, lambda costs: flops_ns + sum(costs.dense_ns(dense_work, **amounts)))


_LOOPS: Final[Mapping[tuple[str, ...], Sequence[Callable[[Lab], _Loop]]]] = {
    ("batch_us",): [functools.partial(_in_memory, dim=_WIDE, ids=1, is_training=True)],
    ("byte_ns", "id_ns"): [
        functools.partial(_in_memory, dim=dim, ids=_IDS, is_training=is_training)
        for dim, is_training in ((_WIDE, False), (_WIDE, True), (_NARROW, True))
    ],
    ("miss_ns",): [functools.partial(_misses, is_cold=False)],
    ("read_ns",): [functools.partial(_misses, is_cold=True)],
    ("append_ns", "append_ns_per_byte", "transaction_us"): [
        functools.partial(_writes, dim=dim, part=part) for dim, part in ((_NARROW, 8), (_NARROW, 64), (_WIDE, 8))
    ],
    ("wake_us", "value_ns"): [functools.partial(_dense, samples=samples) for samples in _DENSE_SAMPLES],
}
"""In the order in which they are timed; each finds the costs of its key."""
