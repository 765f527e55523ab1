"""Streams that compute at once, as on the CPU, and check what a device would be free to do.

Every stream has a vector clock; a mark carries its stream's, and whoever follows or has waited for the mark is behind
it. Work on the same slot, one of the two writing, must be so ordered whatever the streams' speeds. Whether a mark has
passed when somebody asks is drawn at random.
"""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tierstore.hbm import pool, twin
from tierstore.hbm.streams import Staging, Streams


class Access(NamedTuple):
    stream: str
    time: int


class Trace:
    """Clocks of streams and threads, and who used which slot last; ``problems`` are pairs out of order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.num_accesses = 0
        self.lock = threading.RLock()
        self._own = threading.local()
        self._clocks: dict[str, Counter[str]] = {}
        self._writes: dict[int, Access] = {}
        self._reads: dict[int, dict[str, Access]] = {}

    @property
    def thread(self) -> str:
        return f"thread {threading.get_ident()}"

    @property
    def stream(self) -> str:
        return getattr(self._own, "stream", None) or f"compute of {self.thread}"

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = getattr(self._own, "stream", None)
        self._own.stream = stream
        yield
        self._own.stream = before

    def clock(self, who: str) -> "Counter[str]":
        return self._clocks.setdefault(who, Counter())

    def advance(self) -> "Counter[str]":
        """Give the current stream more work: it comes after what this thread has waited for."""
        clock = self.clock(self.stream)
        clock |= self.clock(self.thread)
        clock[self.stream] += 1
        self._clocks[self.stream] = clock
        return clock

    def use(self, name: str, slots: list[int], *, writes: bool) -> None:
        with self.lock:
            clock = self.advance()
            self.num_accesses += len(slots)
            now = Access(self.stream, clock[self.stream])
            for slot in slots:
                others = [self._writes[slot]] if slot in self._writes else []
                if writes:
                    others += self._reads.pop(slot, {}).values()
                    self._writes[slot] = now
                else:
                    self._reads.setdefault(slot, {})[now.stream] = now
                late = [other for other in others if clock[other.stream] < other.time]
                self.problems += [f"{name} of slot {slot} on {now.stream} is not after {other}" for other in late]


class TracingMark:
    def __init__(self, trace: Trace, clock: "Counter[str]") -> None:
        self._trace = trace
        self._passed = False
        self.clock = clock

    def query(self) -> bool:
        if self._passed or self._trace.random.random() < 0.2:
            self.synchronize()
        return self._passed

    def synchronize(self) -> None:
        with self._trace.lock:
            self._passed = True
            self._trace.clock(self._trace.thread).update(self.clock - self._trace.clock(self._trace.thread))


class TracingStreams(Streams):
    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def side(self) -> Any:
        return self._trace.on("side")

    def mark(self) -> TracingMark:
        with self._trace.lock:
            return TracingMark(self._trace, Counter(self._trace.advance()))

    def follow(self, mark: TracingMark) -> None:
        with self._trace.lock:
            clock = self._trace.clock(self._trace.stream)
            clock.update(mark.clock - clock)


def install(monkeypatch: pytest.MonkeyPatch, seed: int) -> Trace:
    trace = Trace(seed)
    monkeypatch.setattr(pool, "open_streams", lambda _: TracingStreams(trace))

    def watch(owner: Any, name: str, place: int, *, writes: bool) -> None:
        real = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            slots = given[place]
            if name == "update_rows":  # what is behind is undefined
                slots = slots[: max(int(given[1].num_unique) - given[3], 0)]
            trace.use(name, sorted({slot for slot in slots.tolist() if slot >= 0}), writes=writes)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(twin, "pool_rows", 1, writes=False)
    watch(twin, "dot_rows", 1, writes=False)
    watch(twin, "update_rows", 2, writes=True)
    watch(Staging, "bring", 2, writes=True)
    watch(Staging, "take", 2, writes=False)
    return trace
