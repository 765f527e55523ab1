"""Host memory and cores, and GPUs by torch: bytes a second in order and by rows at random, matrix products, links.

What is of GPUs is of no one maker's devices but the clock, so the same code runs, slowly, with tensors in host memory.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from ...io.mapped import prefetch_word, zeros
from ...kernels.arrays import Int64s
from ...kernels.jit import kernel
from ...system.sizes import machine_memory_bytes
from ..host import Accelerator, Link, Memory, Processor

_REPETITIONS: Final = 5
_MOST_GROWTH: Final = 16
_ENOUGH: Final = 1 / 16
"""Of the time wanted: what tells how much work fills it."""
_ROW_BYTES: Final = 256
_ROW_WORDS: Final = _ROW_BYTES // 8
_PREFETCH_ROWS: Final = 8
_CACHES: Final = 8
"""The array is so many times as large as the last-level cache."""
_LEAST_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 2 << 30
_SHARE_OF_FREE: Final = 0.25
_DEFAULT_CACHE_BYTES: Final = 32 << 20
_ROWS_DRAWN: Final = 1 << 18
_MATRIX: Final = 1536
_BAG: Final = 32
"""Rows that a GPU pools together."""


def rate_of(
    work: Callable[[int], object], *, seconds: float, first: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """How many units a second ``work(units)`` does: the median of five calls, after smaller ones that find their size.

    Args:
        seconds: for all five together, about.
        first: units of the first call; it also warms up.
    """

    def taken(units: int) -> float:
        began = clock()
        work(units)
        return max(clock() - began, 1e-9)  # a coarse clock may not move

    wanted, units = seconds / _REPETITIONS, first
    work(units)
    is_told = False
    while not is_told:
        took = taken(units)
        is_told = took >= wanted * _ENOUGH
        units = max(1, math.ceil(units * min(wanted / took, _MOST_GROWTH)))
    return units / statistics.median(taken(units) for _ in range(_REPETITIONS))


# Host memory and cores


@kernel
def _sum_words(words: Int64s, begin: int, end: int) -> int:
    total = 0
    for index in range(begin, end):
        total += words[index]
    return total


@kernel
def _sum_rows(words: Int64s, firsts: Int64s, begin: int, end: int) -> int:
    """Of the rows that begin at ``firsts[begin:end]``, taken around their end."""
    total = 0
    for number in range(begin, end):
        prefetch_word(words, firsts[(number + _PREFETCH_ROWS) % firsts.shape[0]])
        first = firsts[number % firsts.shape[0]]
        for index in range(first, first + _ROW_WORDS):
            total += words[index]
    return total


def _last_level_cache_bytes() -> int:
    """Of the first core, as the system tells; 32 MiB where it does not."""
    found = _DEFAULT_CACHE_BYTES
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            found = max(found, int(text[:-1]) << 10)
    return found


def _array_bytes() -> int:
    wanted = min(max(_LEAST_BYTES, _CACHES * _last_level_cache_bytes()), _MOST_BYTES)
    return min(wanted, int(psutil.virtual_memory().available * _SHARE_OF_FREE))


def measure_memory(*, seconds: float, threads: int, array_bytes: int | None = None) -> Memory:
    """Read an array of 8 times the last-level cache (at least 256 MiB, at most 2 GiB, a quarter of what is free).

    Args:
        seconds: to spend on it, about.
        threads: each reads a part of its own.
    """
    size_bytes = _array_bytes() if array_bytes is None else array_bytes
    words = zeros(size_bytes // 8, np.int64)
    words[:] = 1  # pages that were never written are all one page
    rows = len(words) // _ROW_WORDS
    firsts = np.random.default_rng(0).integers(0, rows, min(_ROWS_DRAWN, 4 * rows)) * _ROW_WORDS
    with _pool(threads) as over_threads:
        in_order = rate_of(
            lambda passes: [
                over_threads(lambda begin, end: _sum_words(words, begin, end), len(words)) for _ in range(passes)
            ],
            seconds=seconds / 2,
        )
        by_rows = rate_of(
            lambda count: over_threads(lambda begin, end: _sum_rows(words, firsts, begin, end), count),
            seconds=seconds / 2,
            first=1 << 12,
        )
    return Memory(
        capacity_bytes=float(machine_memory_bytes()),
        bytes_per_s=in_order * words.nbytes,
        row_bytes_per_s=by_rows * _ROW_BYTES,
    )


@contextmanager
def _pool(threads: int) -> Iterator[Callable[[Callable[[int, int], Any], int], None]]:
    """A function that calls another for equal parts of a range, one a thread."""
    with ThreadPoolExecutor(threads, "measure") as executor:

        def over_threads(work: Callable[[int, int], Any], count: int) -> None:
            bounds = [count * part // threads for part in range(threads + 1)]
            begins, ends = zip(*itertools.pairwise(bounds), strict=True)
            list(executor.map(work, begins, ends))

        yield over_threads


def measure_processor(*, seconds: float, threads: int, size: int = _MATRIX) -> Processor:
    """Multiply square float32 matrices by torch, on all threads."""
    with torch_threads(threads):
        left, right = torch.rand(size, size), torch.rand(size, size)
        out = torch.empty(size, size)
        products = rate_of(lambda count: [torch.mm(left, right, out=out) for _ in range(count)], seconds=seconds)
    return Processor(cores=threads, flops=max(1.0, products * 2 * size**3))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch use so many threads within it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# GPUs


class DeviceSizes(NamedTuple):
    """How much is moved at a time."""

    memory_bytes: int = 4 << 30
    copy_bytes: int = 256 << 20
    rows: int = 1 << 20
    matrix: int = 8192


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


def measure_accelerator(device: torch.device, *, seconds: float, sizes: DeviceSizes | None = None) -> Accelerator:
    """Time one device. Its power and its price are not known."""
    sizes = sizes or DeviceSizes()
    wait: Callable[[], object] = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    each = seconds / 4
    host = torch.ones(sizes.copy_bytes // 4, pin_memory=device.type == "cuda")
    return Accelerator(
        hbm=_hbm(device, wait, sizes, 2 * each),
        pcie=_link(host, torch.empty_like(host, device=device), wait, each),
        flops=_flops(device, wait, sizes, each),
    )


def _rate(work: Callable[[], Any], wait: Callable[[], object], seconds: float) -> float:
    """Calls a second, the device's work done."""

    def several(count: int) -> None:
        for _ in range(count):
            work()
        wait()

    return rate_of(several, seconds=seconds)


def _hbm(device: torch.device, wait: Callable[[], object], sizes: DeviceSizes, seconds: float) -> Memory:
    """Reads in order by a sum; reads by rows by pooling 32 of them at a time, which writes little."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else sizes.memory_bytes
    rows = min(sizes.memory_bytes, total // 4) // _ROW_BYTES
    table = torch.ones(rows, _ROW_BYTES // 4, device=device)
    ids = torch.randint(0, rows, (sizes.rows // _BAG, _BAG), device=device)
    in_order = _rate(table.sum, wait, seconds / 2)
    by_rows = _rate(lambda: torch.nn.functional.embedding_bag(ids, table, mode="sum"), wait, seconds / 2)
    return Memory(
        capacity_bytes=float(total),
        bytes_per_s=in_order * table.numel() * 4,
        row_bytes_per_s=by_rows * ids.numel() * _ROW_BYTES,
    )


def _link(source: Tensor, target: Tensor, wait: Callable[[], object], seconds: float) -> Link:
    def copy(count: int) -> None:
        target[:count].copy_(source[:count], non_blocking=True)

    whole = _rate(lambda: copy(len(source)), wait, seconds / 2)

    def copy_one() -> None:
        copy(1)
        wait()

    return Link(
        bytes_per_s=whole * source.numel() * source.element_size(), latency_us=1e6 / _rate(copy_one, wait, seconds / 2)
    )


def _flops(device: torch.device, wait: Callable[[], object], sizes: DeviceSizes, seconds: float) -> float:
    """In bfloat16, as mixed-precision training multiplies."""
    left = torch.ones(sizes.matrix, sizes.matrix, dtype=torch.bfloat16, device=device)
    products = _rate(lambda: left @ left, wait, seconds)
    return max(1.0, products * 2 * sizes.matrix**3)
