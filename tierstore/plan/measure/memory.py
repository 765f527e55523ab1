"""Host memory and cores: bytes a second in order and by rows at random, float32 matrix products."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from ...io.mapped import prefetch_word, zeros
from ...kernels.arrays import Int64s
from ...kernels.jit import kernel
from ...system.sizes import machine_memory_bytes
from ..host import Memory, Processor
from .timing import rate_of

__all__ = ["ROW_BYTES", "last_level_cache_bytes", "measure_memory", "measure_processor", "torch_threads"]

ROW_BYTES: Final = 256
_ROW_WORDS: Final = ROW_BYTES // 8
_PREFETCH_ROWS: Final = 8
_CACHES: Final = 8
"""The array is so many times as large as the last-level cache."""
_LEAST_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 2 << 30
_SHARE_OF_FREE: Final = 0.25
_DEFAULT_CACHE_BYTES: Final = 32 << 20
_ROWS_DRAWN: Final = 1 << 18
_MATRIX: Final = 1536


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


def last_level_cache_bytes() -> int:
    """Of the first core, as the system tells; 32 MiB where it does not."""
    found = _DEFAULT_CACHE_BYTES
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            found = max(found, int(text[:-1]) << 10)
    return found


def _array_bytes() -> int:
    wanted = min(max(_LEAST_BYTES, _CACHES * last_level_cache_bytes()), _MOST_BYTES)
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
        row_bytes_per_s=by_rows * ROW_BYTES,
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
