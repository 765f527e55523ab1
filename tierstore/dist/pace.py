"""How long the steps of each rank take, and a warning where one keeps the others waiting.

In a step that ranks make together each takes as long as the slowest. What tells them apart is the time that they do not
spend in exchanges, where who is done waits. Each rank counts that over its last 100 steps; the numbers travel with
exchanges that there are anyway.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

_LOG: Final = logging.getLogger("tierstore")
WINDOW: Final = 100
"""Steps."""
NO_REPORT: Final = (0, 0, 0, 0, 0)
_SLOW: Final = 1.5
_MICRO: Final = 1e6


class StepTime(NamedTuple):
    """Seconds of a step of one rank, on average, from one backward pass to the next.

    Attributes:
        busy: outside of exchanges. exchanging: in them, waiting for other ranks included.
        ssd: of threads that read and wrote rows. processor: of all its threads.
    """

    busy: float = 0.0
    exchanging: float = 0.0
    ssd: float = 0.0
    processor: float = 0.0


class Pace:
    """Of this rank's steps.

    Args:
        exchanging_s: seconds in exchanges so far. ssd_s: of threads that read and wrote rows.
        clock, processor_s: seconds, of the wall and of this process's threads.

    Attributes:
        report: what goes to other ranks: the number of the last whole window, then its ``StepTime`` in microseconds.
    """

    def __init__(
        self,
        exchanging_s: Callable[[], float],
        ssd_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._clocks = clock, exchanging_s, ssd_s, processor_s
        self._begun = self._now()
        self._last = StepTime()
        self._counted = ""
        self._steps = self._judged = 0
        self.report: Sequence[int] = NO_REPORT

    def note_backward(self, table: str) -> None:
        """Rows of a table and others get gradients; a step is one with the table that came first."""
        if not self._counted:  # set-up is over
            self._counted, self._begun = table, self._now()
            return
        if table != self._counted:
            return
        self._steps += 1
        if self._steps == WINDOW:
            self._last = self._mean()
            self._begun, self._steps = self._now(), 0
            self.report = self.report[0] + 1, *(int(_MICRO * each) for each in self._last)

    def recent(self) -> StepTime:
        """Of the last whole window, or of the steps so far."""
        return self._last if self.report[0] else self._mean()

    def note(
        self, windows: Sequence[int], times_us: Sequence[Sequence[int]], rank: int, numbers: Sequence[int]
    ) -> None:
        """Judge the ranks' reports, once for each window: ``rank`` 0 logs which of them, by its number, is slow.

        Args:
            windows: of each rank. times_us: for each field of ``StepTime``, of each rank.
        """
        window = self.report[0]
        if window == self._judged or any(each != window for each in windows):
            return
        self._judged = window
        times = [StepTime(*(each / _MICRO for each in of_rank)) for of_rank in zip(*times_us, strict=True)]
        usual = StepTime(*map(statistics.median_low, zip(*times, strict=True)))
        slowest = max(range(len(times)), key=lambda each: times[each].busy)
        if rank == 0 and times[slowest].busy > _SLOW * usual.busy > 0:
            _LOG.warning(
                "rank %d is slow: its last %d steps took %.3g ms each outside of exchanges, others %.3g: it %s",
                numbers[slowest], WINDOW, 1e3 * times[slowest].busy, 1e3 * usual.busy, _cause(times[slowest], usual),
            )  # fmt: skip

    def _now(self) -> StepTime:
        clock, exchanging, ssd, processor = (each() for each in self._clocks)
        return StepTime(clock - exchanging, exchanging, ssd, processor)

    def _mean(self) -> StepTime:
        spans = zip(self._now(), self._begun, strict=True)
        return StepTime(*((now - begun) / max(self._steps, 1) for now, begun in spans))


def _cause(own: StepTime, usual: StepTime) -> str:
    """What makes up most of a rank's delay."""
    most = (own.busy - usual.busy) / 2
    if own.ssd - usual.ssd > most:
        return "reads and writes SSD; give it more ddr, or move tables: tierstore shard plan"
    if own.processor - usual.processor > most:
        return "computes; move tables from it (tierstore shard plan), or look what else runs there"
    return "waits, for its batches or for a processor that others use"
