"""Dynamic batching: queries that come while a batch runs are run together as the next one.

What becomes of a query::

    submit ──▶ waits ──take──▶ runs ──▶ answered, or INTERNAL
       │         │              │
       ├─nobody before it, at_once──▶ answered, in the event loop
       │         │              │
       │         └──────┬───────┘
       │                ▼
       │              gone: deadline, caller cancelled, batcher closed
       ▼
    refused at once: INVALID, OVERLOADED, UNAVAILABLE, DEADLINE

A batcher has at most one *job* in the executor, and a job runs one batch. The batch is taken from the line when the job
starts, so it holds all who came by then. If more wait when it ends, the next job goes to the end of the executor's
queue, behind the jobs of other batchers: models take turns, batch by batch, and whatever else is given to the same
executor runs between two batches.

Two kinds of queries have a line of their own, and are run alone, by turns with the batches: long ones, of more than
``LONG_IDS`` ids, and those of clients of whom a query failed within a minute. A long one pauses between its parts: then
the batches that wait are run, of all models. So nobody waits for more than a part of another's query, and a client that
sends what a model cannot take makes no other's batch fail. Such a client is also slowed down: from its second failure
on, errors reach it ``FAILED_SECONDS`` late.

While the executor has nothing to do, the event loop asks ``at_once``: to hand a small query to another thread and back
would take longer than the query.

A batch that fails is run again in halves, so that a query that makes it fail does so alone. Before that the model is
asked what it answered before: if that fails too, so does the batch.

The line and the job flag change under a lock, in the event loop and in the executor's thread. Futures and timers are
touched in the event loop only.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from .base import LONG_IDS, Pause
from .config import ServeConfig
from .logs import log_batch_failed
from .messages import ServeError, Status

MAX_FAILED_RUNS: Final = 64
"""Of one batch, after which the rest fails unasked, if the model has never answered anything."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A query until its caller has gone; ``future``, the event loop's, is done once nobody waits for the answer."""

    query: Any
    num_samples: int
    future: asyncio.Future[Any]
    entered: float
    deadline: float
    client: str = ""


class Attempt(NamedTuple):
    """The last run of some queries: their answers, or an error."""

    waiters: Sequence[Waiter]
    answers: Sequence[Any]
    error: BaseException | None
    seconds: float


def is_no_querys_fault(error: BaseException | None) -> bool:
    """Whether a run would have ended so with any queries: the model is not there any more, or nobody waits."""
    return isinstance(error, ServeError) and error.status in (Status.UNAVAILABLE, Status.DEADLINE)


class OneThread(ThreadPoolExecutor):
    """Runs jobs one after the other, in a thread of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self._order = threading.Lock()  # so that the last is the last in line
        self._last: Future[Any] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every job is done. The only other thread that gives it jobs may then do what jobs do."""
        return self._last is None or self._last.done()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._order:
            self._last = future = super().submit(fn, *args, **kwargs)
        return future


def between(turn: threading.Lock, pause: Pause) -> Pause:
    """The pause of a batch that holds the turn; others have theirs meanwhile.

    One store's batch runs at a time: threads of several would wait for each other at every call that gives up Python's
    lock, up to 5 ms each, and a batch uses all threads by itself.
    """

    def paused() -> None:
        turn.release()
        try:
            pause()
        finally:
            turn.acquire()

    return paused


MAX_QUEUE_REQUESTS: Final = 4096
"""Queries that may wait for one model."""
_SUSPECT_SECONDS: Final = 60.0
"""For which a client's queries are run alone, after one that failed."""
_MAX_SUSPECTS: Final = 4096
FAILED_SECONDS: Final = 0.25
"""By which an error is late that is not the client's first within a minute: a client that asks again once it is
answered then fails four times a second, not a thousand."""
_Line: TypeAlias = "OrderedDict[Waiter, None]"
"""Any who waits may leave at any time, and leaves nothing behind: so not a deque."""


class Batcher:
    """One model's queries on their way through the executor. All methods are for one event loop.

    Args:
        run: runs a batch, in the executor: the answer to each query, or a ``ServeError``. It may pause between parts.
        at_once: called in the event loop while the executor is idle: the answer, or None if it would take long.
        others: batchers of the same executor, whose batches run in pauses.
        observer: called after each batch: model, queries, samples, seconds that each waited, seconds that it ran.
    """

    def __init__(
        self,
        model: str,
        run: Callable[[Sequence[Any], Pause | None], Sequence[Any]],
        executor: OneThread,
        config: ServeConfig,
        *,
        at_once: Callable[[Any], Any] = lambda _: None,
        others: Callable[[], Iterable["Batcher"]] = lambda: (),
        observer: Callable[[str, int, int, Sequence[float], float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model: Final = model
        self._run: Final = run
        self._at_once: Final = at_once
        self._others: Final = others
        self._answered: Any = None  # a query that the model has answered
        self._suspects: dict[str, float] = {}  # until when
        self._executor: Final = executor
        self._config: Final = config
        self._observer: Final = observer
        self._clock: Final = clock
        self._lock: Final = threading.Lock()
        self._together: Final[_Line] = OrderedDict()
        self._alone: Final[_Line] = OrderedDict()
        self._is_alones_turn = False
        self.num_waiting_samples = 0
        self._has_job = False
        self.is_open = True
        """Whether queries are taken: until it is drained or closed, or the executor takes no more jobs."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._present: Final[set[Waiter]] = set()
        self._idle: Final = asyncio.Event()

    async def submit(self, query: Any, deadline: float, client: str = "") -> Any:
        """Wait for a query's answer; to cancel the caller takes it back. ``deadline`` is seconds on the clock.

        Raises:
            ServeError: INVALID, more samples than a batch may have; OVERLOADED; UNAVAILABLE, draining or closed;
                DEADLINE; INTERNAL, ``run`` failed; or what ``run`` said of this query alone.
        """
        num_samples, now = query.num_samples, self._clock()
        if not self.is_open:
            raise self._stopping()
        if num_samples > self._config.max_batch_samples:
            raise ServeError(
                Status.INVALID,
                f"model {self._model!r}: {num_samples} samples, some ids of each counted as one, are more than "
                f"max_batch_samples, {self._config.max_batch_samples}; send them in several requests, or start the "
                "server with a larger --max-batch-samples",
            )
        if deadline <= now:
            raise self._late()
        if self._executor.is_idle:
            answer = self._at_once(query)
            if answer is not None:
                self._observer(self._model, 1, num_samples, (0.0,), self._clock() - now)
                return answer
        self._loop = asyncio.get_running_loop()
        waiter = Waiter(query, num_samples, self._loop.create_future(), now, deadline, client)
        self._enter(waiter)
        timer = self._loop.call_later(deadline - now, lambda: self._fail(waiter, self._late()))
        try:
            return await waiter.future
        finally:
            timer.cancel()
            with self._lock:
                self._remove(waiter)
            self._present.discard(waiter)
            self._note_idle()

    async def drain(self, seconds: float) -> None:
        """Take no more queries, finish those that came, and close; after ``seconds``, close all the same."""
        self.is_open = False
        self._note_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self.close()

    def close(self) -> None:
        """Take no more queries; those that came get UNAVAILABLE. A batch that runs goes on, for nobody."""
        self.is_open = False
        for waiter in self._present:
            self._fail(waiter, self._stopping())
        self._note_idle()

    def check_integrity(self) -> None:
        """AssertionError if the counts do not add up."""
        with self._lock:
            line, counted, has_job = [*self._together, *self._alone], self.num_waiting_samples, self._has_job
        total = sum(waiter.num_samples for waiter in line)
        assert counted == total <= self._config.max_queue_samples, f"{counted} wait"
        assert len(line) <= MAX_QUEUE_REQUESTS, f"{len(line)} wait"
        assert self._present >= set(line), "someone waits whose caller has gone"
        is_served = has_job or all(waiter.future.done() for waiter in self._present)
        assert not line or is_served, f"{len(line)} wait for no job"

    def _enter(self, waiter: Waiter) -> None:
        """Into the line; ServeError if it is full."""
        samples, full = self._config.max_queue_samples, ""
        with self._lock:
            num_waiting = len(self._together) + len(self._alone)
            if num_waiting >= MAX_QUEUE_REQUESTS:
                full = f"{num_waiting} requests wait already"
            elif self.num_waiting_samples + waiter.num_samples > samples:
                many = f"{self.num_waiting_samples} samples wait already and {waiter.num_samples} more came"
                full = f"{many}, max_queue_samples is {samples}"
            if full:
                raise ServeError(Status.OVERLOADED, f"model {self._model!r}: {full}; try again later")
            runs_alone = self._is_suspect(waiter) or waiter.query.num_ids > LONG_IDS
            (self._alone if runs_alone else self._together)[waiter] = None
            self.num_waiting_samples += waiter.num_samples
            starts = self._claim_job()
        self._present.add(waiter)
        if starts:
            self._start_job()

    def _remove(self, waiter: Waiter) -> None:
        """From the line, if it is there. Under the lock."""
        for line in (self._together, self._alone):
            if waiter in line:
                del line[waiter]
                self.num_waiting_samples -= waiter.num_samples

    def _is_suspect(self, waiter: Waiter) -> bool:
        """Whether a query of its client failed within the minute before it came."""
        return bool(self._suspects) and self._suspects.get(waiter.client, waiter.entered) > waiter.entered

    def _is_wanted(self, waiter: Waiter) -> bool:
        return waiter.deadline > self._clock() and not waiter.future.done()

    def _first(self, line: _Line) -> Waiter | None:
        """Who is first in a line; those who are late or gone are dropped. Under the lock."""
        while line:
            waiter = next(iter(line))
            if self._is_wanted(waiter):
                return waiter
            self._remove(waiter)
        return None

    def _take(self) -> list[Waiter]:
        """A batch from the front, up to the first that does not fit. Under the lock."""
        taken: list[Waiter] = []
        room = self._config.max_batch_samples
        while (waiter := self._first(self._together)) is not None and waiter.num_samples <= room:
            self._remove(waiter)
            room -= waiter.num_samples
            taken.append(waiter)
        return taken

    def _stopping(self) -> ServeError:
        return ServeError(Status.UNAVAILABLE, f"model {self._model!r}: the server stops")

    def _late(self) -> ServeError:
        return ServeError(Status.DEADLINE, f"model {self._model!r}: the deadline passed before the answer was there")

    @staticmethod
    def _fail(waiter: Waiter, error: ServeError) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _note_idle(self) -> None:
        if not self.is_open and not self._present and not self._has_job:
            self._idle.set()

    def _claim_job(self) -> bool:
        """Whether the caller is to start a job now. Under the lock."""
        if self._has_job or not (self._together or self._alone):
            return False
        self._has_job = True
        return True

    def _start_job(self) -> None:
        """In either thread, without the lock."""
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # it was shut down first; nobody must wait for it
            with self._lock:
                self._has_job = False
            self._post(self.close)

    def _post(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # A loop that is closed has nobody waiting.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _work(self) -> None:
        """A job: run one batch, or a query alone. In the executor's thread."""
        with self._lock:
            alone = self._first(self._alone)
            if not self._is_alones_turn and self._first(self._together) is not None:
                alone = None
            self._is_alones_turn = alone is None
            batch = self._take() if alone is None else [alone]
            if alone is not None:
                self._remove(alone)
        taken = self._clock()
        attempts = self._run_all(batch, None if alone is None else lambda: self._pause(alone))
        with self._lock:
            self._has_job = False
            starts = self._claim_job()
        self._post(self._deliver, attempts, taken)
        if starts:
            self._start_job()

    def _run_all(self, batch: Sequence[Waiter], pause: Pause | None) -> list[Attempt]:
        """Run a batch, again in halves as long as it fails; each query still wanted is in one attempt, in order.
        Failures are logged once a second, with a traceback; ServeErrors are answers."""
        finished: list[Attempt] = []
        fault: BaseException | None = None
        waiting = [batch]
        num_failed, is_sound = 0, None  # whether the model answers anything; None: unknown
        while waiting:
            group = [waiter for waiter in waiting.pop() if not waiter.future.done()]
            if not group:
                continue
            attempt = self._attempt(group, pause)
            if attempt.error is None:
                is_sound = True
                if group[-1].query.num_ids <= LONG_IDS:
                    self._answered = group[-1].query
                finished.append(attempt)
                continue
            num_failed += 1
            if not isinstance(attempt.error, ServeError):
                fault = attempt.error
            if len(group) > 1 and is_sound is None and not is_no_querys_fault(attempt.error):
                is_sound = self._is_sound()
            is_hopeless = is_sound is False or (is_sound is None and num_failed >= MAX_FAILED_RUNS)
            if len(group) == 1 or is_hopeless or is_no_querys_fault(attempt.error):
                finished.append(attempt)
            else:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]
        if fault is not None:  # the last is of few queries, so it tells most about the cause
            count = sum(len(each.waiters) for each in finished if each.error is not None)
            log_batch_failed(self._model, f"{count} of {len(batch)} queries of a batch failed", fault)
        return finished

    def _attempt(self, waiters: Sequence[Waiter], pause: Pause | None) -> Attempt:
        started = self._clock()
        try:
            answers = self._run([waiter.query for waiter in waiters], pause)
            if len(answers) != len(waiters):
                raise RuntimeError(f"{len(answers)} outputs came back for {len(waiters)} queries")
        # Whatever it is, somebody waits for an answer, and the thread has other batches to run.
        except BaseException as error:
            return Attempt(waiters, (), error, self._clock() - started)
        return Attempt(waiters, answers, None, self._clock() - started)

    def _is_sound(self) -> bool | None:
        """Whether the model answers again what it has answered before; None if that was nothing."""
        if self._answered is None:
            return None
        try:
            self._run([self._answered], None)
        except BaseException:  # as of any other query
            return False
        return True

    def _pause(self, alone: Waiter) -> None:
        """Between two parts of a query. ServeError if nobody waits for it."""
        if not self._is_wanted(alone):
            raise self._late()
        for each in (self, *self._others()):
            each._run_waiting()

    def _run_waiting(self) -> None:
        """Run the batch that waits, amid another's query."""
        if self._together:
            with self._lock:
                batch = self._take()
            taken = self._clock()
            self._post(self._deliver, self._run_all(batch, None), taken)

    def _deliver(self, attempts: list[Attempt], taken: float) -> None:
        for attempt in attempts:
            self._answer(attempt)
        self._note_idle()
        waiters = [waiter for attempt in attempts for waiter in attempt.waiters]
        if waiters:
            self._observer(
                self._model,
                len(waiters),
                sum(waiter.num_samples for waiter in waiters),
                [taken - waiter.entered for waiter in waiters],
                sum(attempt.seconds for attempt in attempts),
            )

    def _answer(self, attempt: Attempt) -> None:
        if attempt.error is None:
            for waiter, answer in zip(attempt.waiters, attempt.answers, strict=True):
                if isinstance(answer, ServeError):
                    self._fail(waiter, answer)
                elif not waiter.future.done():
                    waiter.future.set_result(answer)
            return
        is_alone, no_fault = len(attempt.waiters) == 1, is_no_querys_fault(attempt.error)
        error = ServeError(Status.INTERNAL, f"model {self._model!r} failed; the server's log says why")
        if isinstance(attempt.error, ServeError) and (is_alone or no_fault):
            error = ServeError(attempt.error.status, str(attempt.error))
        first = attempt.waiters[0]
        is_late = is_alone and not no_fault and self._is_suspect(first)
        if is_alone and not no_fault and first.client:
            self._suspects.pop(first.client, None)
            self._suspects[first.client] = self._clock() + _SUSPECT_SECONDS
            if len(self._suspects) > _MAX_SUSPECTS:
                del self._suspects[next(iter(self._suspects))]
        for waiter in attempt.waiters:
            if is_late:
                waiter.future.get_loop().call_later(FAILED_SECONDS, self._fail, waiter, error)
            else:
                self._fail(waiter, error)
