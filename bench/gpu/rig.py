"""A device, ids for it, and how time on it is measured.

On CUDA, work is timed by events on the stream it is given to. Before each measurement the device is kept busy for
about a millisecond, while the host enqueues what is measured, and its L2 cache is written over; so neither launches
nor what an earlier repetition left in the cache count, unless the work itself waits for the host.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_HEAD_START_CYCLES: Final = 2_000_000
_FLUSH_BYTES: Final = 256 * 2**20
"""Several times the L2 cache of any GPU so far."""
_WARM_UPS: Final = 4
"""Triton compiles a kernel when it is first used, torch loads one."""
_COPY_BYTES: Final = {True: 2**30, False: 2**22}
"""Of a copy on the device, or on the CPU."""
_COPY_REPETITIONS: Final = 11
_WAITS: Final = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Not cudaDeviceSynchronize: the profiler's own."""

Action = Callable[[int], object]


def rounds_of(repetitions: int) -> int:
    """Numbers that ``Rig.times`` gives to actions: as many batches, and none comes twice."""
    return _WARM_UPS + repetitions


class Rig:
    """One device, "cuda" (the current one) or "cpu", for the length of a benchmark's part; ``seed`` is of everything
    random."""

    def __init__(self, device: str, *, seed: int = 1) -> None:
        self.is_cuda = device != "cpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device("cpu")
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.seed = seed
        self._flush: torch.Tensor | None = None

    def wait(self) -> None:
        """Until the device has done everything it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object]) -> float:
        """From an idle device until it is done."""
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - start

    def times(
        self, actions: Mapping[str, Action], *, repetitions: int, before: Mapping[str, Action] | None = None
    ) -> dict[str, list[float]]:
        """Device seconds of each action, called with a number that is new in each turn, from 0; actions take turns.
        What must happen before an action each time, not timed, is in ``before``."""
        taken: dict[str, list[Callable[[], float]]] = {name: [] for name in actions}
        for number in range(_WARM_UPS + repetitions):
            for name, action in actions.items():
                if before and name in before:
                    before[name](number)
                taken[name].append(self._on_cuda(action, number) if self.is_cuda else _on_cpu(action, number))
        self.wait()
        return {name: [seconds() for seconds in each[_WARM_UPS:]] for name, each in taken.items()}

    def _on_cuda(self, action: Action, number: int) -> Callable[[], float]:
        """Do it; its seconds, to be asked for when the device is done."""
        begin, end = self.event(), self.event()
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        action(number)
        end.record()
        return lambda: float(begin.elapsed_time(end)) / 1e3

    def event(self) -> Any:
        """A CUDA event that keeps the time."""
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written a second by a large copy within the device's memory, median."""
        size = _COPY_BYTES[self.is_cuda]
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        seconds = self.times({"copy": lambda _: target.copy_(source)}, repetitions=_COPY_REPETITIONS)["copy"]
        return 2 * size / statistics.median(seconds)


def _on_cpu(action: Action, number: int) -> Callable[[], float]:
    begin = time.perf_counter()
    action(number)
    seconds = time.perf_counter() - begin
    return lambda: seconds


class Asked(NamedTuple):
    """What a call asks of the device: kernels, copies and fills, and times that a thread of the host waited for it."""

    launches: int
    waits: int


def asked_of(rig: Rig, action: Callable[[], object]) -> Asked | None:
    """As the profiler sees it in all threads; None where it sees nothing: on the CPU, or without CUPTI."""
    if not rig.is_cuda:
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    rig.wait()
    try:
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            action()
            rig.wait()
        events: Any = profile.events()
    except RuntimeError:  # what was timed before stands
        traceback.print_exc()
        return None
    on_device: Any = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    # Spans that a program names are on the device's timeline, too.
    launches = sum(event.device_type == on_device and not event.is_user_annotation for event in events)
    return Asked(launches, sum(event.name in _WAITS for event in events)) if launches else None


class Zipf:
    """Rows of a table: rank ``r`` (from 0) as likely as ``(r + 1) ** -exponent``, ranks scattered over the table."""

    def __init__(self, rig: Rig, rows: int, exponent: float) -> None:
        self._generator, self._device, self._rows = rig.generator, rig.device, rows
        ranks = torch.arange(1, rows + 1, dtype=torch.float64, device=rig.device)
        self._sums = torch.cumsum(ranks**-exponent, 0) if exponent else None
        # A step that visits every row, about the golden section of the table.
        self._step = max(1, int(rows * 0.618))
        while math.gcd(self._step, rows) > 1:
            self._step += 1

    def draw(self, count: int) -> Tensor:
        """int64 [count], on the device."""
        if self._sums is None:
            return torch.randint(self._rows, (count,), generator=self._generator, device=self._device)
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator, device=self._device)
        ranks = torch.searchsorted(self._sums, uniform * self._sums[-1]).clamp_(max=self._rows - 1)
        return ranks * self._step % self._rows
