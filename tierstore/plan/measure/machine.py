"""Memory, matrix products and links by torch: of the host's cores and of GPUs alike."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import psutil
import torch

from ...system.sizes import machine_memory_bytes
from ..host import Accelerator, Link, Memory, Processor

_REPETITIONS: Final = 5
_MOST_GROWTH: Final = 16
_ENOUGH: Final = 1 / 16
"""Of the time wanted: what tells how much work fills it."""
_ROW_BYTES: Final = 256
_BAG: Final = 32
"""Rows that are pooled together, so that little is written."""


class Sizes(NamedTuple):
    """How much is moved at a time; memory at most a quarter of what is free."""

    memory_bytes: int
    matrix: int
    rows: int = 1 << 20
    copy_bytes: int = 256 << 20


HOST_SIZES: Final = Sizes(1 << 30, 1536)
GPU_SIZES: Final = Sizes(4 << 30, 8192)


def rate_of(work: Callable[[int], object], *, seconds: float, first: int = 1) -> float:
    """Units a second that ``work(units)`` does: the median of five calls, after smaller ones that find their size."""

    def taken(units: int) -> float:
        began = time.perf_counter()
        work(units)
        return max(time.perf_counter() - began, 1e-9)  # a coarse clock may not move

    wanted, units, took = seconds / _REPETITIONS, first, 0.0
    work(units)
    while took < wanted * _ENOUGH:
        took = taken(units)
        units = max(1, math.ceil(units * min(wanted / took, _MOST_GROWTH)))
    return units / statistics.median(taken(units) for _ in range(_REPETITIONS))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_host(*, seconds: float, threads: int, sizes: Sizes) -> tuple[Memory, Processor]:
    """Memory in order and by rows of 256 bytes at random, and float32 matrix products, on all threads."""
    bench = _Bench(torch.device("cpu"), sizes, seconds / 3)
    with torch_threads(threads):
        memory = bench.memory(machine_memory_bytes(), psutil.virtual_memory().available)
        return memory, Processor(cores=threads, flops=bench.flops(torch.float32))


def measure_accelerators(device: str, *, seconds: float) -> tuple[Accelerator, ...]:
    """One for each GPU of ``device``: none for "cpu", all for "cuda", one for "cuda:1". ValueError: torch sees no
    such device."""
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device={device[:100]!r}: expected "cpu", "cuda" or "cuda:1"') from None
    if asked.type == "cpu":
        return ()
    count = torch.cuda.device_count() if asked.type == "cuda" else 0
    if not count or (asked.index or 0) >= count:
        raise ValueError(f'device={device!r}: torch sees {count} CUDA devices here; give "cpu", or see to the driver')
    numbers = range(count) if asked.index is None else [asked.index]
    return tuple(measure_accelerator(torch.device("cuda", each), seconds=seconds / len(numbers)) for each in numbers)


def measure_accelerator(device: torch.device, *, seconds: float, sizes: Sizes = GPU_SIZES) -> Accelerator:
    """Time one device; bfloat16 products, as mixed-precision training multiplies. Its power and price are not known."""
    bench = _Bench(device, sizes, seconds / 5)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else sizes.memory_bytes
    return Accelerator(hbm=bench.memory(total, total), pcie=bench.link(), flops=bench.flops(torch.bfloat16))


class _Bench(NamedTuple):
    """Of one device; ``seconds``: to spend on each figure, about."""

    device: torch.device
    sizes: Sizes
    seconds: float

    def rate(self, work: Callable[[], Any]) -> float:
        def several(count: int) -> None:
            for _ in range(count):
                work()
            self.wait()

        return rate_of(several, seconds=self.seconds)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self, total: int, free: int) -> Memory:
        rows = max(_BAG, min(self.sizes.memory_bytes, free // 4) // _ROW_BYTES)
        table = torch.ones(rows, _ROW_BYTES // 4, device=self.device)
        ids = torch.randint(0, rows, (self.sizes.rows // _BAG, _BAG), device=self.device)
        pooled = functools.partial(torch.nn.functional.embedding_bag, ids, table, mode="sum")
        return Memory(
            capacity_bytes=float(total),
            bytes_per_s=self.rate(table.sum) * table.numel() * 4,
            row_bytes_per_s=self.rate(pooled) * ids.numel() * _ROW_BYTES,
        )

    def link(self) -> Link:
        host = torch.ones(self.sizes.copy_bytes // 4, pin_memory=self.device.type == "cuda")
        target = torch.empty_like(host, device=self.device)

        def copy_one() -> None:
            target[:1].copy_(host[:1], non_blocking=True)
            self.wait()

        whole = self.rate(lambda: target.copy_(host, non_blocking=True))
        return Link(bytes_per_s=whole * 4 * len(host), latency_us=1e6 / self.rate(copy_one))

    def flops(self, dtype: torch.dtype) -> float:
        left = torch.ones(self.sizes.matrix, self.sizes.matrix, dtype=dtype, device=self.device)
        out = torch.empty_like(left)
        return max(1.0, self.rate(lambda: torch.mm(left, left, out=out)) * 2 * self.sizes.matrix**3)
