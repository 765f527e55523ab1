"""Splitting a kernel over threads: contiguous ranges, kernels without the GIL, results independent of the split."""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_WORK", "Workers", "default_threads"]

MIN_WORK: Final = 8192
"""Row operations below which handing work to another thread costs more than it saves."""


def default_threads() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """A pool of ``threads`` threads, the calling one included; threads are started when first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "tierstore") if threads > 1 else None

    def run(self, work: Callable[[int, int], Any], bounds: Sequence[int]) -> None:
        """Call ``work(begin, end)`` for each pair of neighbours in ``bounds``; return, or raise, when all are done."""
        pairs = [(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]
        if self._executor is None or len(pairs) < 2:
            for begin, end in pairs:
                work(begin, end)
            return
        futures: list[Future[Any]] = []
        try:
            futures += [self._executor.submit(work, begin, end) for begin, end in pairs[1:]]
            work(*pairs[0])
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def parts(self, work: int) -> int:
        """Into how many ranges so many row operations are best split."""
        return min(self.threads, max(1, work // MIN_WORK))

    def split(self, starts: NDArray[np.int64]) -> list[int]:
        """Bounds of at most ``threads`` ranges of items of about equal work.

        Args:
            starts: int64 [items + 1], ascending: work before each item, as offsets give it.
        """
        items, total = len(starts) - 1, int(starts[-1] - starts[0])
        parts = min(self.parts(total), max(1, items))
        if parts == 1:
            return [0, items]
        targets = starts[0] + np.arange(1, parts) * (total / parts)
        return [0, *np.searchsorted(starts, targets).tolist(), items]

    def close(self) -> None:
        """Stop the threads."""
        if self._executor is not None:
            self._executor.shutdown()
