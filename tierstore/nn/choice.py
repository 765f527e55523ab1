"""Whether bringing rows in ahead makes steps faster, as measured."""

import statistics
import time
from typing import Final

AUTO_DEPTH: Final = 2
_GROUP: Final = AUTO_DEPTH + 1  # batches that are read together between steps
_RUN_STEPS: Final = 6 * _GROUP
_MOST_RUNS: Final = 64
_CLEARLY: Final = 0.98


class Choice:
    """Whether to bring rows in ahead, by the times of steps: runs of them the faster way, and now and then one the
    other way, four times as rarely each time it proves slower again.

    Attributes:
        is_ahead: the way of the next step.
    """

    def __init__(self) -> None:
        self.is_ahead = True
        self._seconds: dict[bool, float] = {}
        self._run: list[float] = []
        self._unsettled = _RUN_STEPS  # steps after a change: batches that were fetched ahead are used up, or made
        self._runs_left = self._every = 1
        self._is_trial = False
        self._began = time.perf_counter()

    def note_step(self) -> None:
        """A step is over."""
        now, began = time.perf_counter(), self._began
        self._began = now
        if self._unsettled:
            self._unsettled -= 1
            return
        self._run.append(now - began)
        if len(self._run) == _RUN_STEPS:
            groups = sorted(sum(self._run[first : first + _GROUP]) for first in range(0, _RUN_STEPS, _GROUP))
            self._end_run(statistics.mean(groups[:-1]))
            self._run.clear()

    def _end_run(self, seconds: float) -> None:
        way, other = self.is_ahead, not self.is_ahead
        self._seconds[way] = (self._seconds.get(way, seconds) + seconds) / 2
        self._runs_left -= 1
        if self._is_trial:
            is_better = self._seconds[way] < _CLEARLY * self._seconds[other]
            self._every = 1 if is_better else min(4 * self._every, _MOST_RUNS)
            self._runs_left, self._is_trial = self._every, False
            self._go(way if is_better else other)
        elif not self._runs_left:
            self._is_trial = True
            self._go(other)

    def _go(self, way: bool) -> None:
        self._unsettled = 0 if way is self.is_ahead else AUTO_DEPTH + 2
        self.is_ahead = way
