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
_CPU: Final = torch.device("cpu")


class Sizes(NamedTuple):
    """How much is moved at a time; memory at most a quarter of what is free."""

    memory_bytes: int
    matrix: int
    rows: int = 1 << 18
    copy_bytes: int = 256 << 20


HOST_SIZES: Final = Sizes(1 << 30, 1536, rows=1 << 20)
GPU_SIZES: Final = Sizes(4 << 30, 8192, rows=1 << 20)


def rate_of(work: Callable[[int], object], *, seconds: float, first: int = 1) -> float:
    """How many units a second ``work(units)`` does: the median of five calls, after smaller ones that find their size.

    Args:
        seconds: for all five together, about.
        first: units of the first call; it also warms up.
    """

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
    """Have torch use so many threads within it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_host(*, seconds: float, threads: int, sizes: Sizes) -> tuple[Memory, Processor]:
    """Memory in order and by rows of 256 bytes at random, and float32 matrix products, on all threads."""
    with torch_threads(threads):
        memory = _memory(_CPU, seconds * 2 / 3, sizes, machine_memory_bytes(), psutil.virtual_memory().available)
        return memory, Processor(cores=threads, flops=_flops(_CPU, seconds / 3, sizes, torch.float32))


def measure_accelerators(device: str, *, seconds: float) -> tuple[Accelerator, ...]:
    """One for each GPU of ``device``: none for "cpu", all for "cuda", one for "cuda:1".

    Args:
        seconds: to spend on it, about, all together.

    Raises:
        ValueError: torch sees no such device.
    """
    devices = _devices(device)
    return tuple(measure_accelerator(each, seconds=seconds / len(devices)) for each in devices)


def _devices(device: str) -> list[torch.device]:
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device={device[:100]!r}: expected "cpu", "cuda" or "cuda:1"') from None
    if asked.type == "cpu":
        return []
    count = torch.cuda.device_count() if asked.type == "cuda" else 0
    if not count or (asked.index or 0) >= count:
        raise ValueError(f'device={device!r}: torch sees {count} CUDA devices here; give "cpu", or see to the driver')
    return [torch.device("cuda", number) for number in range(count) if asked.index in (None, number)]


def measure_accelerator(device: torch.device, *, seconds: float, sizes: Sizes = GPU_SIZES) -> Accelerator:
    """Time one device; bfloat16 products, as mixed-precision training multiplies. Its power and price are not known."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else sizes.memory_bytes
    return Accelerator(
        hbm=_memory(device, seconds / 2, sizes, total, total),
        pcie=_link(device, seconds / 4, sizes),
        flops=_flops(device, seconds / 4, sizes, torch.bfloat16),
    )


def _rate(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Calls a second, the device's work done."""

    def several(count: int) -> None:
        for _ in range(count):
            work()
        _wait(device)

    return rate_of(several, seconds=seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, seconds: float, sizes: Sizes, total: int, free: int) -> Memory:
    rows = max(_BAG, min(sizes.memory_bytes, free // 4) // _ROW_BYTES)
    table = torch.ones(rows, _ROW_BYTES // 4, device=device)
    ids = torch.randint(0, rows, (sizes.rows // _BAG, _BAG), device=device)
    in_order = _rate(table.sum, device, seconds / 2)
    pooled = functools.partial(torch.nn.functional.embedding_bag, ids, table, mode="sum")
    return Memory(
        capacity_bytes=float(total),
        bytes_per_s=in_order * table.numel() * 4,
        row_bytes_per_s=_rate(pooled, device, seconds / 2) * ids.numel() * _ROW_BYTES,
    )


def _link(device: torch.device, seconds: float, sizes: Sizes) -> Link:
    host = torch.ones(sizes.copy_bytes // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(host, device=device)

    def copy(count: int) -> None:
        target[:count].copy_(host[:count], non_blocking=True)

    def copy_one() -> None:
        copy(1)
        _wait(device)

    whole = _rate(lambda: copy(len(host)), device, seconds / 2)
    return Link(bytes_per_s=whole * 4 * len(host), latency_us=1e6 / _rate(copy_one, device, seconds / 2))


def _flops(device: torch.device, seconds: float, sizes: Sizes, dtype: torch.dtype) -> float:
    left = torch.ones(sizes.matrix, sizes.matrix, dtype=dtype, device=device)
    out = torch.empty_like(left)
    products = _rate(lambda: torch.mm(left, left, out=out), device, seconds)
    return max(1.0, products * 2 * sizes.matrix**3)
