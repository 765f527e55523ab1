"""Load on a server: at given times whatever the server does, or as fast as it answers."""

import asyncio
import contextlib
import gc
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from .clients import Answer, SocketClient

_LAST_ANSWER_SECONDS: Final = 30.0


class Quantiles(NamedTuple):
    """Of latencies, in ms."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Any) -> "Quantiles":
        if not len(seconds):
            return cls(*[float("nan")] * 3)
        return cls(*(1e3 * np.quantile(seconds, (0.5, 0.95, 0.99))).tolist())


class Load(NamedTuple):
    """What load came to; float64 [n], in seconds: ``intended``, from the start until a request was to leave;
    ``latency``, from then until the whole answer was there, NaN where none came; ``late``, from then until the
    generator came to it. ``cores`` is the generator's time of a processor over ``seconds``, which end with the last
    answer; ``errors`` are of the first few requests that failed."""

    intended: Any
    latency: Any
    late: Any
    seconds: float
    cores: float
    num_failed: int
    errors: tuple[str, ...]

    def since(self, seconds: float) -> Any:
        """Latencies of those that were answered and due from then on."""
        return self.latency[(self.intended >= seconds) & np.isfinite(self.latency)]


def poisson(generator: np.random.Generator, rate: float, seconds: float) -> Any:
    """float64: times of a Poisson process with ``rate`` a second."""
    times = np.cumsum(generator.exponential(1 / rate, int(rate * seconds * 1.2) + 50))
    return times[times < seconds]


class _Record:
    """What became of requests, as answers come in."""

    def __init__(self) -> None:
        self.intended, self.latency, self.late = list[float](), list[float](), list[float]()
        self.errors: list[str] = []
        self.start = time.perf_counter()
        self._cpu = time.process_time()
        self.in_flight = 0

    def ask(self, client: SocketClient, request: bytes, due: float, then: Callable[[Answer], None]) -> None:
        """Send one that was due so many seconds after the start."""
        index = len(self.intended)
        self.intended.append(due)
        self.late.append(time.perf_counter() - self.start - due)
        self.latency.append(float("nan"))
        self.in_flight += 1

        def done(answer: Answer) -> None:
            self.in_flight -= 1
            if answer.error:
                self.errors.append(answer.error)
            else:
                self.latency[index] = time.perf_counter() - self.start - due
            then(answer)

        client.ask(request, done)

    def load(self) -> Load:
        seconds, cores = time.perf_counter() - self.start, time.process_time() - self._cpu
        intended, latency, late = map(np.array, (self.intended, self.latency, self.late))
        failed = int(np.count_nonzero(np.isnan(latency)))
        return Load(intended, latency, late, seconds, cores / seconds, failed, tuple(self.errors[:5]))


def _timed_loop() -> asyncio.AbstractEventLoop:
    """It wakes up to the microsecond: only select takes its time limit in them."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _run_alone(client: SocketClient, send: Callable[[_Record], Coroutine[Any, Any, None]]) -> Load:
    """What requests come to, in a loop of their own, without the garbage collector."""

    async def work() -> Load:
        await client.open()
        await send(record := _Record())
        load = record.load()
        await client.close()
        return load

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=_timed_loop) as runner:
            return runner.run(work())
    finally:
        gc.enable()


def open_loop(
    client: SocketClient,
    requests: Sequence[bytes],
    intended: Any,
    on_answer: Callable[[int, Answer], None] = lambda *_: None,
) -> Load:
    """Send each request when it is due, in ``intended`` seconds from the start, in order; what is not answered some
    time after the last one has failed. ``on_answer`` is given a request's index and its answer."""
    last = intended[-1] if len(intended) else 0.0

    async def send(record: _Record) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last + _LAST_ANSWER_SECONDS):
                for index, (request, due) in enumerate(zip(requests, intended.tolist(), strict=True)):
                    wait = record.start + due - time.perf_counter()
                    if wait > 0 or not index % 16:
                        await asyncio.sleep(max(wait, 0))
                    record.ask(client, request, due, partial(on_answer, index))
                while record.in_flight:
                    await asyncio.sleep(0.001)

    return _run_alone(client, send)


def closed_loop(client: SocketClient, requests: Sequence[bytes], *, at_once: int, seconds: float) -> Load:
    """Keep ``at_once`` requests in flight, from the list over and over; ``intended`` is when each was sent."""

    async def send(record: _Record) -> None:
        finished = asyncio.Event()

        def ask() -> None:
            now = time.perf_counter() - record.start
            record.ask(client, requests[len(record.intended) % len(requests)], now, then)

        def then(answer: Answer) -> None:
            if time.perf_counter() - record.start < seconds and not answer.error:
                ask()
            elif not record.in_flight:
                finished.set()

        for _ in range(at_once):
            ask()
        async with asyncio.timeout(seconds + _LAST_ANSWER_SECONDS):
            await finished.wait()

    return _run_alone(client, send)
