"""Load on a server: at given times whatever the server does, or as fast as it answers."""

import asyncio
import gc
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import uvloop

from .clients import Answer, Client

__all__ = ["Load", "Quantiles", "Stream", "closed_loop", "open_loop", "poisson", "run_alone"]

_LAST_ANSWER_SECONDS: Final = 30.0
_T = TypeVar("_T")
_OnAnswer = Callable[[int, Answer], None]


class Quantiles(NamedTuple):
    """Of latencies, in ms."""

    p50: float
    p95: float
    p99: float
    mean: float
    highest: float

    @classmethod
    def of(cls, seconds: Any) -> "Quantiles":
        if not len(seconds):
            return cls(*[float("nan")] * 5)
        p50, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99)).tolist()
        each = (p50, p95, p99, float(np.mean(seconds)), float(np.max(seconds)))
        return cls(*(1e3 * value for value in each))


class Load(NamedTuple):
    """What load came to.

    Attributes:
        intended: float64 [n], seconds from the start at which each request was to leave.
        latency: float64 [n], seconds from then until the whole answer was there; NaN where none came.
        late: float64 [n], seconds from then until the generator came to it.
        seconds: from the start until the last answer.
        cores: processor time that the generator took, of the time that passed.
        start: when it began, on the clock of ``time.perf_counter``, on Linux that of ``time.monotonic``.
        errors: of the first few requests that failed, what was said.
    """

    intended: Any
    latency: Any
    late: Any
    seconds: float
    cores: float
    start: float
    num_failed: int
    errors: tuple[str, ...]

    def since(self, seconds: float, until: float = np.inf) -> Any:
        """Latencies of those that were answered and due from then on, and before ``until``."""
        chosen = (self.intended >= seconds) & (self.intended < until) & np.isfinite(self.latency)
        return self.latency[chosen]


class Stream(NamedTuple):
    """Requests of one kind, each at its time; ``on_answer`` is told the request's index and its answer."""

    client: Client
    requests: Sequence[bytes]
    intended: Any
    on_answer: _OnAnswer | None = None


def poisson(generator: np.random.Generator, rate: float, seconds: float) -> Any:
    """float64: times of a Poisson process with ``rate`` a second."""
    gaps = generator.exponential(1 / rate, int(rate * seconds * 1.2) + 50)
    times = np.cumsum(gaps)
    return times[times < seconds]


def run_alone(work: Callable[[], Coroutine[Any, Any, _T]], *, is_timed: bool) -> _T:
    """Run a coroutine in a loop of its own, without the garbage collector.

    Args:
        is_timed: wake up to the microsecond, where other loops know milliseconds.
    """

    def timed_loop() -> asyncio.AbstractEventLoop:
        # Only select takes its time limit in microseconds.
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=timed_loop if is_timed else uvloop.new_event_loop) as runner:
            return runner.run(work())
    finally:
        gc.enable()


class _Record:
    """Latencies as they come in."""

    def __init__(self, stream: Stream, finished: asyncio.Event) -> None:
        count = len(stream.intended)
        self.stream = stream
        self.latency = np.full(count, np.nan)
        self.late = np.zeros(count)
        self.errors: list[str] = []
        self._finished = finished
        self._left = count
        self._start = 0.0

    async def send(self, start: float) -> None:
        self._start = start
        client, on_answer = self.stream.client, self.stream.on_answer
        for index, (request, due) in enumerate(zip(self.stream.requests, self.stream.intended.tolist(), strict=True)):
            wait = start + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            elif not index % 16:
                await asyncio.sleep(0)
            self.late[index] = time.perf_counter() - start - due
            client.ask(request, self._done(index, due, on_answer))

    def _done(self, index: int, due: float, on_answer: _OnAnswer | None) -> Callable[[Answer], None]:
        def done(answer: Answer) -> None:
            if answer.error:
                self.errors.append(answer.error)
            else:
                self.latency[index] = time.perf_counter() - self._start - due
            if on_answer is not None:
                on_answer(index, answer)
            self._left -= 1
            if not self._left:
                self._finished.set()

        return done

    def load(self, seconds: float, cores: float) -> Load:
        failed = int(np.count_nonzero(np.isnan(self.latency)))
        return Load(
            self.stream.intended, self.latency, self.late, seconds, cores, self._start, failed, tuple(self.errors[:5])
        )


def open_loop(streams: Sequence[Stream]) -> list[Load]:
    """Send each request when it is due; what is not answered some time after the last one has failed."""

    async def work() -> list[Load]:
        finished = [asyncio.Event() for _ in streams]
        records = [_Record(stream, event) for stream, event in zip(streams, finished, strict=True)]
        for stream in streams:
            await stream.client.open()
        start, used = time.perf_counter(), time.process_time()
        try:
            await asyncio.gather(*(record.send(start) for record in records))
            async with asyncio.timeout(_LAST_ANSWER_SECONDS):
                await asyncio.gather(*(event.wait() for event in finished))
        except TimeoutError:
            pass
        seconds = time.perf_counter() - start
        cores = (time.process_time() - used) / seconds
        for stream in streams:
            await stream.client.close()
        return [record.load(seconds, cores) for record in records]

    return run_alone(work, is_timed=True)


def closed_loop(client: Client, requests: Sequence[bytes], *, at_once: int, seconds: float) -> Load:
    """Keep ``at_once`` requests under way, from the list over and over; ``intended`` is when each was sent."""

    async def work() -> Load:
        sent: list[float] = []
        latency: list[float] = []
        errors: list[str] = []
        finished = asyncio.Event()
        under_way = 0

        def ask() -> None:
            nonlocal under_way
            under_way += 1
            now = time.perf_counter()
            client.ask(requests[len(sent) % len(requests)], done(now))
            sent.append(now - start)

        def done(at: float) -> Callable[[Answer], None]:
            def note(answer: Answer) -> None:
                nonlocal under_way
                under_way -= 1
                now = time.perf_counter()
                if answer.error:
                    errors.append(answer.error)
                else:
                    latency.append(now - at)
                if now - start < seconds and not answer.error:
                    ask()
                elif not under_way:
                    finished.set()

            return note

        await client.open()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(at_once):
            ask()
        async with asyncio.timeout(seconds + _LAST_ANSWER_SECONDS):
            await finished.wait()
        passed = time.perf_counter() - start
        cores = (time.process_time() - used) / passed
        await client.close()
        found = np.array(latency)
        return Load(np.array(sent), found, np.zeros(0), passed, cores, start, len(errors), tuple(errors[:5]))

    return run_alone(work, is_timed=False)
