"""A device and how time on it is measured.

On CUDA, work is timed by events on the stream it is given to. Before each measurement the device is kept busy for
about a millisecond, while the host enqueues what is measured, and its L2 cache is written over; so neither launches
nor what an earlier repetition left in the cache count, unless the work itself waits for the host.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from ..common import Spread

__all__ = ["Action", "Call", "Rig", "rounds_of"]

_HEAD_START_CYCLES: Final = 2_000_000
_FLUSH_BYTES: Final = 256 * 2**20
"""Several times the L2 cache of any GPU so far."""
_WARM_UPS: Final = 4
"""Triton compiles a kernel when it is first used, torch loads one."""
_COPY_BYTES: Final = 2**30
_COPY_BYTES_ON_CPU: Final = 2**22
_COPY_REPETITIONS: Final = 11

Action = Callable[[int], object]


class Call(NamedTuple):
    """Seconds of one call on an idle device.

    Attributes:
        returned: until the host was free again.
        done: until the device had done it.
    """

    returned: float
    done: float


def rounds_of(repetitions: int) -> int:
    """Numbers that ``Rig.times`` and then ``Rig.calls`` give to actions: as many batches, and none comes twice."""
    return _WARM_UPS + 2 * repetitions


class Rig:
    """One device for the length of a benchmark's part.

    Args:
        device: "cuda" (the current one) or "cpu".
        seed: of everything random.
    """

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

    def times(
        self, actions: Mapping[str, Action], *, repetitions: int, before: Mapping[str, Action] | None = None
    ) -> dict[str, list[float]]:
        """Device seconds of each action, called with a number that is new in each turn, from 0; actions take turns.

        Args:
            before: what must happen before an action each time, not timed.
        """
        prepare = before or {}
        for number in range(_WARM_UPS):
            self._turn(actions, prepare, number)
        rounds = [self._turn(actions, prepare, _WARM_UPS + number) for number in range(repetitions)]
        self.wait()
        return {name: [seconds() for seconds in (each[name] for each in rounds)] for name in actions}

    def calls(self, actions: Mapping[str, Action], *, repetitions: int) -> dict[str, list[Call]]:
        """Seconds by the host's clock of each action, after ``times``; its numbers go on."""
        taken: dict[str, list[Call]] = {name: [] for name in actions}
        for number in range(repetitions):
            for name, action in actions.items():
                self.wait()
                begin = time.perf_counter()
                action(_WARM_UPS + repetitions + number)
                returned = time.perf_counter() - begin
                self.wait()
                taken[name].append(Call(returned, time.perf_counter() - begin))
        return taken

    def _turn(
        self, actions: Mapping[str, Action], before: Mapping[str, Action], number: int
    ) -> dict[str, Callable[[], float]]:
        """Each action once; its seconds, to be asked for when the device is done."""
        taken = {}
        for name, action in actions.items():
            if name in before:
                before[name](number)
            taken[name] = self._on_cuda(action, number) if self.is_cuda else _on_cpu(action, number)
        return taken

    def _on_cuda(self, action: Action, number: int) -> Callable[[], float]:
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
        size = _COPY_BYTES if self.is_cuda else _COPY_BYTES_ON_CPU
        source, target = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        seconds = self.times({"copy": lambda _: target.copy_(source)}, repetitions=_COPY_REPETITIONS)["copy"]
        return 2 * size / Spread.of(seconds).median


def _on_cpu(action: Action, number: int) -> Callable[[], float]:
    begin = time.perf_counter()
    action(number)
    seconds = time.perf_counter() - begin
    return lambda: seconds
