"""What a rank holds, sends and spends its steps on; ``ShardedStore.balance`` gathers it."""

import time
from collections.abc import Callable
from typing import NamedTuple


class Traffic(NamedTuple):
    """Running totals of one rank: bytes to and from others, and seconds in exchanges, waiting for others included."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class StepTime(NamedTuple):
    """Seconds of a step of one rank, on average, from one backward pass to the next.

    In a step that ranks make together each takes as long as the slowest. ``busy`` tells them apart: who is done waits
    in exchanges.

    Attributes:
        busy: outside of exchanges. exchanging: in them, waiting for other ranks included.
        ssd: of threads that read and wrote rows. processor: of all its threads.
    """

    busy: float = 0.0
    exchanging: float = 0.0
    ssd: float = 0.0
    processor: float = 0.0


class Load(NamedTuple):
    """What a rank holds, and did.

    Attributes:
        num_rows, size_bytes: that it owns; with their optimizer state, were they all in memory.
        lookups: rows that ranks asked it for.
        traffic: of its exchanges, without those of ids that ``prefetch`` sent.
        step: since the last ``balance``; a rank whose ``busy`` is far above the others' keeps them waiting.
    """

    num_rows: int
    size_bytes: int
    lookups: int
    traffic: Traffic
    step: StepTime


class StepClock:
    """Times this rank's steps. ``exchanging_s``, ``ssd_s``: seconds so far, in exchanges and of threads at rows."""

    def __init__(self, exchanging_s: Callable[[], float], ssd_s: Callable[[], float]) -> None:
        self._exchanging_s, self._ssd_s = exchanging_s, ssd_s
        self._begun, self._counted, self._steps = StepTime(), "", 0

    def note_backward(self, table: str) -> None:
        """Rows of a table get gradients. A step is one with the table that came first; set-up before it is none."""
        if not self._counted:
            self._counted, self._begun = table, self._now()
        elif table == self._counted:
            self._steps += 1

    def mean(self) -> StepTime:
        """Of the steps since the last call."""
        now, steps = self._now(), self._steps
        pairs = zip(now, self._begun if steps else now, strict=True)
        self._begun, self._steps = now, 0
        return StepTime(*((end - begun) / max(steps, 1) for end, begun in pairs))

    def _now(self) -> StepTime:
        exchanging = self._exchanging_s()
        return StepTime(time.perf_counter() - exchanging, exchanging, self._ssd_s(), time.process_time())
