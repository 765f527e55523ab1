"""A batcher against a model of it: random submits, cancels, deadlines, failures and drains, in every interleaving."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.serve import batching
from tierstore.serve.base import LONG_IDS, Pause
from tierstore.serve.batching import Batcher
from tierstore.serve.config import ServeConfig
from tierstore.serve.messages import ServeError

PASSES = 8
"""Through the loop's queue, more than any chain of callbacks needs."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """Time stands still but for ``advance``."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.complaints: list[dict[str, Any]] = []
        super().__init__()
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        for _ in range(PASSES):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.settle()


class SteppedExecutor(Executor):
    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.is_shut_down = False
        self._is_running = False

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self._is_running

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run_next(self) -> None:
        future, job = self.jobs.pop(0)
        if future.set_running_or_notify_cancel():
            self._is_running = True
            try:
                future.set_result(job())
            finally:
                self._is_running = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_shut_down = True


NEVER = float("inf")


@dataclass(eq=False)
class Asked:
    """A query, and what the model of the batcher says of it: ``outcome`` is "" while it is waited for."""

    number: int
    num_samples: int
    deadline: float
    is_poison: bool
    is_quick: bool
    num_ids: int
    outcome: str = ""
    num_successes: int = 0  # runs that gave it an answer
    task: asyncio.Task | None = None

    def seen(self) -> str:
        """How it really ended, "" if it has not."""
        if not self.task.done():
            return ""
        if self.task.cancelled():
            return "CANCELLED"
        error = self.task.exception()
        if isinstance(error, ServeError):
            return error.status.name
        assert error is None
        assert self.task.result() == self.number
        return "ANSWERED"


ACTIONS = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("advance"), st.integers(1, 3)),
    st.tuples(st.just("submit"), st.integers(1, 4)),
)

QUERIES = st.tuples(
    st.sampled_from([1, 1, 1, 2, 2, 3, 4, 13]),
    st.sampled_from([None, None, None, -1, 0, 1, 2, 3, 4, 6, 12]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
    st.sampled_from([1, 1, LONG_IDS + 1]),
)
"""Samples; quarters of a second until the deadline; whether a batch fails that has it; whether it can be answered at
once; ids."""


class BatcherMachine(RuleBasedStateMachine):
    """The model knows who waits, who runs, and how each must end; times are multiples of 1/4 s, so they are exact."""

    @initialize(max_batch=st.integers(2, 12), more_queue=st.integers(0, 12), max_requests=st.integers(2, 10))
    def start(self, max_batch: int, more_queue: int, max_requests: int) -> None:
        self.loop, self.executor = SteppedLoop(), SteppedExecutor()
        bounds = {"max_batch_samples": max_batch, "max_queue_samples": max_batch + more_queue}
        self.config = ServeConfig(store="x", **bounds)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(batching, "MAX_QUEUE_REQUESTS", max_requests)
        self.batcher = Batcher("m", self.run, self.executor, self.config, at_once=self.at_once, clock=self.loop.time)
        self.asked: list[Asked] = []
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.is_closed = False
        self.is_alones_turn = False
        self.known: Asked | None = None
        self.drain_until = NEVER
        self.drain: asyncio.Task | None = None
        self.actions: list[tuple[str, int]] = []
        self.expected: list[Asked] | None = None
        self.last_run = -1
        self.faults: list[AssertionError] = []

    def end(self, asked: Asked, outcome: str) -> None:
        assert not asked.outcome
        asked.outcome = outcome
        if asked in self.waiting:
            self.waiting.remove(asked)

    def refusal(self, asked: Asked) -> str:
        if self.is_closed:
            return "UNAVAILABLE"
        if asked.num_samples > self.config.max_batch_samples:
            return "INVALID"
        if asked.deadline <= self.loop.now:
            return "DEADLINE"
        num_waiting = sum(each.num_samples for each in self.waiting)
        full = len(self.waiting) >= batching.MAX_QUEUE_REQUESTS
        return "OVERLOADED" if full or num_waiting + asked.num_samples > self.config.max_queue_samples else ""

    def at_once(self, asked: Asked) -> int | None:
        if not asked.is_quick:
            return None
        asked.num_successes += 1
        return asked.number

    def ask(self, num_samples: int, seconds: float, is_poison: bool, is_quick: bool = False, num_ids: int = 1) -> None:
        asked = Asked(len(self.asked), num_samples, self.loop.now + seconds, is_poison, is_quick, num_ids)
        self.asked.append(asked)
        asked.outcome = self.refusal(asked)
        if not asked.outcome and is_quick and self.executor.is_idle:
            asked.outcome = "ANSWERED"
        if not asked.outcome:
            self.waiting.append(asked)
        asked.task = self.loop.create_task(self.batcher.submit(asked, asked.deadline))
        self.loop.settle()

    def live(self) -> list[Asked]:
        return [each for each in self.waiting + self.running if not each.outcome]

    def cancel_one(self, index: int) -> None:
        if live := self.live():
            asked = live[index % len(live)]
            asked.task.cancel()
            self.end(asked, "CANCELLED")

    def let_time_pass(self) -> None:
        """The model's side of a clock that has moved."""
        for asked in self.live():
            if asked.deadline <= self.loop.now:
                self.end(asked, "DEADLINE")
        if self.loop.now >= self.drain_until:
            for asked in self.live():
                self.end(asked, "UNAVAILABLE")

    def act(self, what: str, number: int) -> None:
        if what == "cancel":
            self.cancel_one(number)
        elif what == "submit":
            self.ask(number, NEVER, False, is_quick=number % 2 == 0)
        else:
            self.loop.now += number / 2
            self.let_time_pass()
        self.loop.settle()

    def run(self, queries: Sequence[Asked], pause: Pause | None) -> list[int]:
        """The model that is served; whatever it raises, the batcher takes for its failure."""
        if self.expected is None and queries == [self.known] and self.known not in self.running:
            return [self.known.number]  # it is asked again, as a batch failed
        try:
            self.check_batch(list(queries))
            assert (pause is not None) == (queries[0].num_ids > LONG_IDS)
            if pause is not None and not self.is_closed:
                self.pause(queries[0], pause)
        except AssertionError as error:
            self.faults.append(error)
        if any(each.is_poison for each in queries):
            raise ArithmeticError("secret")
        for each in queries:
            each.num_successes += 1
        if queries[-1].num_ids <= LONG_IDS:
            self.known = queries[-1]
        return [each.number for each in queries]

    def pause(self, asked: Asked, pause: Pause) -> None:
        """Amid a long query; who waits for a batch is served, unless the query is not waited for any more."""
        if asked.outcome:
            with pytest.raises(ServeError):
                pause()
            return
        outer, self.running = self.running, self.next_batch()
        self.expected = self.running or None
        pause()
        assert self.expected is None, "a batch that should have run amid another's query has not"
        self.conclude()
        self.running = outer
        self.loop.settle()

    def next_batch(self) -> list[Asked]:
        room, batch = self.config.max_batch_samples, []
        for asked in self.waiting:
            if asked.num_ids <= LONG_IDS:
                if asked.num_samples > room:
                    break
                room -= asked.num_samples
                batch.append(asked)
        self.waiting = [asked for asked in self.waiting if asked not in batch]
        return batch

    def check_batch(self, queries: list[Asked]) -> None:
        if self.expected is not None:
            assert queries == self.expected, "first come, first served, as many as fit"
            self.expected = None
            while self.actions:
                self.act(*self.actions.pop())
        else:
            assert queries == [each for each in self.running if each in queries], "in order"
            assert not any(each.outcome for each in queries), "run again for nobody"
            assert queries[0].number > self.last_run, "the halves in order"
        self.last_run = queries[0].number if len(queries) == 1 else -1

    @rule(queries=st.lists(QUERIES, min_size=1, max_size=8))
    def submit(self, queries: list[tuple[int, int | None, bool, bool, int]]) -> None:
        for num_samples, quarters, is_poison, is_quick, num_ids in queries:
            self.ask(num_samples, NEVER if quarters is None else quarters / 4, is_poison, is_quick, num_ids)

    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        self.cancel_one(index)
        self.loop.settle()

    @rule(quarters=st.integers(1, 9))
    def advance(self, quarters: int) -> None:
        self.loop.now += quarters / 4
        self.let_time_pass()
        self.loop.settle()

    @precondition(lambda self: self.executor.jobs)
    @rule(
        actions=st.lists(ACTIONS, max_size=3),
        lag_quarters=st.sampled_from([0, 0, 1, 3]),
        cancels=st.sampled_from([None, None, None, 0, 1, 2]),
    )
    def work(self, actions: list[tuple[str, int]], lag_quarters: int, cancels: int | None) -> None:
        """The executor gets to its next job, maybe before the loop sees that time has passed or a caller has gone."""
        self.loop.now += lag_quarters / 4
        if cancels is not None:
            self.cancel_one(cancels)
        is_at_end = self.loop.now >= self.drain_until
        late = [each for each in self.waiting if each.deadline <= self.loop.now]
        for asked in late:
            self.end(asked, "DEADLINE")
        alone = [asked for asked in self.waiting if asked.num_ids > LONG_IDS]
        if alone and (self.is_alones_turn or len(alone) == len(self.waiting)):
            batch, self.is_alones_turn = [alone[0]], False
            self.waiting.remove(alone[0])
        else:
            batch, self.is_alones_turn = self.next_batch(), True
        self.running, self.expected, self.actions = batch, batch or None, list(actions)
        self.executor.run_next()
        assert self.expected is None, "a batch that should have run has not"
        if not is_at_end:
            self.conclude()
            self.let_time_pass()
        self.loop.settle()
        if is_at_end:
            # Whether the answers or the end of the drain come first is the loop's to say.
            for asked in self.running:
                if not asked.outcome:
                    asked.outcome = asked.seen()
                    assert asked.outcome in ("ANSWERED", "INTERNAL", "UNAVAILABLE", "DEADLINE")
            self.let_time_pass()
        self.running = []

    def conclude(self) -> None:
        for asked in self.running:
            if not asked.outcome:
                late = asked.deadline <= self.loop.now
                self.end(asked, "DEADLINE" if late else "INTERNAL" if asked.is_poison else "ANSWERED")

    # Late, as little can happen after it.
    @precondition(lambda self: self.drain is None and len(self.asked) >= 20)
    @rule(seconds=st.integers(0, 3))
    def begin_to_drain(self, seconds: int) -> None:
        self.is_closed = True
        self.drain_until = self.loop.now + seconds
        self.drain = self.loop.create_task(self.batcher.drain(seconds))
        if not seconds:
            self.let_time_pass()
        self.loop.settle()

    @invariant()
    def ends_as_the_model_says(self) -> None:
        for asked in self.asked:
            assert asked.seen() == asked.outcome, asked
            assert asked.num_successes <= 1, asked
            assert asked.num_successes or asked.outcome != "ANSWERED", asked

    @invariant()
    def counts_who_waits_and_asks_for_work_when_due(self) -> None:
        self.batcher.check_integrity()
        assert self.batcher.num_waiting_samples == sum(each.num_samples for each in self.waiting)
        assert len(self.executor.jobs) <= 1
        assert self.executor.jobs or not self.waiting
        assert not self.loop.complaints
        assert not self.faults

    def teardown(self) -> None:
        self.patch.undo()
        if self.drain is None:
            self.begin_to_drain(3)
        while self.executor.jobs:
            self.work([], 0, None)
        self.loop.settle()
        assert self.drain.done()
        assert self.batcher.num_waiting_samples == 0
        self.ends_as_the_model_says()
        self.counts_who_waits_and_asks_for_work_when_due()
        assert all(each.outcome for each in self.asked)
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


class TestBatcherStates(BatcherMachine.TestCase):
    settings = settings(stateful_step_count=30, max_examples=max(80, settings.default.max_examples))
