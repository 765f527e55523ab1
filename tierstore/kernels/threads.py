"""Splitting a kernel over threads: contiguous ranges, kernels without the GIL, results independent of the split.

The main thread borrows the threads that torch computes with: after an operation of torch they spin for a while, and
take the processors from other threads. Other threads, such as the prefetch pipeline's, use a pool of our own, and so
does everybody where torch's OpenMP is not GNU's."""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..system.signals import shielded
from ..system.sizes import cpu_limit
from .arrays import Int64s

MIN_WORK: Final = 4096  # row operations below which handing work to another thread costs more than it saves


def default_threads() -> int:
    """CPUs this process may use; of a quota that is no whole number, one more: threads wait, too."""
    return math.ceil(cpu_limit())


Range = tuple[int, int]
_BODY: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Shared:
    """Ranges that threads take while there are any, however many threads come, and when: one that comes late, as
    its start had failed at first, finds none. ``errors``: what they raised."""

    def __init__(self, work: Callable[[int, int], Any], ranges: Sequence[Range]) -> None:
        self.errors: list[BaseException] = []
        self._work = work
        self._left = iter(ranges)
        self._active = 0
        self._idle = threading.Condition()

    def work_off(self, *, wait: bool = False) -> None:
        """Do what nobody took, and with ``wait`` return when all are done."""
        with self._idle:
            self._active += 1
        try:
            for begin, end in self._left:
                if begin < end:
                    self._work(begin, end)
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()
                while wait and self._active:
                    self._idle.wait()


class _TorchTeam:
    """The threads of torch's OpenMP, GNU's, for the main thread. ``address``: of ``GOMP_parallel``."""

    def __init__(self, library: Path) -> None:
        self._parallel = ctypes.CDLL(str(library)).GOMP_parallel
        self._parallel.argtypes = (_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self.address = ctypes.cast(self._parallel, ctypes.c_void_p).value or 0
        self._body = _BODY(self._work_off)
        self._shared: _Shared | None = None

    def run(self, shared: _Shared, threads: int) -> bool:
        """Have so many threads work it off; False, and nothing done, if they are at work already or this is not the
        main thread."""
        if self._shared is not None or threading.current_thread() is not threading.main_thread():
            return False
        try:
            self._shared = shared
            self._parallel(self._body, None, threads, 0)
        finally:
            self._shared = None
        return True

    def _work_off(self, _: int | None) -> None:
        if self._shared is not None:
            self._shared.work_off()


_MAIN_PROCESS: Final = os.getpid()


@functools.cache
def _torch_team() -> _TorchTeam | None:
    """None where another OpenMP, or another system, is in use, and in a forked process, where GNU's waits for threads
    that only the parent has. Other packages, as scikit-learn, may have loaded a GNU's of their own."""
    if os.getpid() != _MAIN_PROCESS:
        return None
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
        libraries = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "libgomp" in line}
        own = [each for each in libraries if "torch" in each.parts] or [*libraries]
        return _TorchTeam(own[0]) if len(own) == 1 else None
    except (AttributeError, OSError):
        return None


os.register_at_fork(after_in_child=_torch_team.cache_clear)


class Workers:
    """``threads`` threads, the calling one included; threads are started when first needed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads - 1, "tierstore") if threads > 1 else None

    def run(self, work: Callable[[int, int], Any], bounds: Sequence[int]) -> None:
        """Call ``work(begin, end)`` for each pair of neighbours in ``bounds``; return, or raise, when all are done."""
        ranges = list(itertools.pairwise(bounds))
        if self._executor is not None and len(ranges) > 1:
            self._run_shared(self._executor, work, ranges)
            return
        for begin, end in ranges:
            if begin < end:
                work(begin, end)

    @shielded
    def _run_shared(self, executor: ThreadPoolExecutor, work: Callable[[int, int], Any], ranges: list[Range]) -> None:
        shared, team = _Shared(work, ranges), _torch_team()
        if team is None or not team.run(shared, len(ranges)):
            with contextlib.suppress(RuntimeError, MemoryError):  # a thread cannot start: the others do its part
                for _ in ranges[1:]:
                    executor.submit(shared.work_off)
        shared.work_off(wait=True)
        if shared.errors:
            raise shared.errors[0]

    def share(self, work: Callable[[int, int], Any], starts: Int64s) -> None:
        """Call ``work(begin, end)`` for ranges of items of about equal work, as many as are worth it. ``starts``, int64
        [items + 1], ascending: work before each item, as offsets give it."""
        items, total = len(starts) - 1, int(starts[-1] - starts[0])
        parts = min(self.threads, max(1, total // MIN_WORK), items)
        if parts > 1:
            # Of whole numbers: for others, numpy would convert all of starts.
            targets = starts[0] + np.arange(1, parts) * total // parts
            self.run(work, [0, *np.searchsorted(starts, targets).tolist(), items])
        elif items:
            work(0, items)

    def divide(self, work: Callable[[int, int], Any], count: int) -> None:
        """``share`` of so many items of equal work."""
        if 0 < count < 2 * MIN_WORK:
            work(0, count)
        elif count:
            self.run(work, [*range(0, count, -(-count // min(self.threads, count // MIN_WORK))), count])

    def native_team(self) -> int:
        """The address of ``GOMP_parallel``, if the calling thread may borrow torch's threads with it; else 0."""
        team = _torch_team() if threading.current_thread() is threading.main_thread() else None
        return team.address if team is not None else 0

    def parts(self, work: int) -> int:
        """Into how many ranges so many row operations are best split."""
        return min(self.threads, max(1, work // MIN_WORK))

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
