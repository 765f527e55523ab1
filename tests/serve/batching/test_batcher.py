"""Dynamic batching, case by case; test_states.py has the random interleavings."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serve.stepping import SteppedExecutor, SteppedLoop
from tierstore.serve import logs
from tierstore.serve.base import LONG_IDS
from tierstore.serve.batching import FAILED_SECONDS, MAX_FAILED_RUNS, Batcher, between
from tierstore.serve.config import ServeConfig
from tierstore.serve.messages import ServeError, Status


@dataclass(frozen=True)
class Ask:
    number: int
    num_samples: int = 1
    is_poison: bool = False
    num_ids: int = 1


def answer(queries: Sequence[Ask]) -> list[int]:
    """The numbers."""
    if any(each.is_poison for each in queries):
        raise ArithmeticError("the secret of the model")
    return [each.number for each in queries]


class Bench:
    """A batcher that moves step by step, and the batches that it ran."""

    def __init__(self, run: Callable[[Sequence[Ask]], list[int]] = answer, **config: int) -> None:
        self.loop, self.executor = SteppedLoop(), SteppedExecutor()
        self.config = ServeConfig(store="x", **config)
        self.batches: list[list[int]] = []
        self.run = run
        self.batcher = self.another("m")

    def another(self, name: str, **options: Any) -> Batcher:
        return Batcher(name, self.note, self.executor, self.config, clock=self.loop.time, **options)

    def note(self, queries: Sequence[Ask], _pause: Any) -> list[int]:
        self.batches.append([each.number for each in queries])
        return self.run(queries)

    def submit(self, ask: Ask, seconds: float | None = None, *, to: Batcher | None = None) -> asyncio.Task[int]:
        deadline = self.loop.now + (1e9 if seconds is None else seconds)
        task = self.loop.create_task((to or self.batcher).submit(ask, deadline))
        self.loop.settle()
        return task

    def work(self) -> None:
        while self.executor.jobs:
            self.executor.run_next()
        self.loop.settle()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []
    logs._failures.clear()  # of a model of the same name

    def make(*arguments: Any, **config: int) -> Bench:
        made.append(Bench(*arguments, **config))
        return made[-1]

    yield make
    for bench in made:
        bench.batcher.close()
        bench.loop.settle()
        bench.batcher.check_integrity()
        assert not bench.batcher._present
        assert not asyncio.all_tasks(bench.loop)
        bench.loop.close()


def status_of(task: asyncio.Task[int]) -> Status:
    error = task.exception()
    assert isinstance(error, ServeError)
    return error.status


def test_models_take_turns(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(max_batch_samples=1)
    second = bench.another("n")
    for number in range(4):
        bench.submit(Ask(number))
    for number in range(10, 12):
        bench.submit(Ask(number), to=second)
    bench.executor.submit(lambda: bench.batches.append([-1]))
    bench.work()
    assert bench.batches == [[0], [10], [-1], [1], [11], [2], [3]]


def test_one_bad_query_fails_alone(make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench()
    tasks = [bench.submit(Ask(number, is_poison=number == 2777)) for number in range(4096)]
    bench.work()
    assert [task.result() for task in tasks if task is not tasks[2777]] == [
        number for number in range(4096) if number != 2777
    ]
    assert status_of(tasks[2777]) is Status.INTERNAL
    assert "secret" not in str(tasks[2777].exception())
    assert len(bench.batches) == 25
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "1 of 4096" in record.message
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


def test_good_queries_are_answered_however_many_bad_ones_are_with_them(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """If the model has answered anything before; one that never has, or has stopped to, is not asked for ever."""
    bench = make_bench()
    tasks = [bench.submit(Ask(number, is_poison=True)) for number in range(1000)]
    bench.work()
    assert {status_of(task) for task in tasks} == {Status.INTERNAL}
    assert len(bench.batches) <= MAX_FAILED_RUNS + 10
    assert len(caplog.records) == 1
    bench.submit(Ask(-1))
    bench.work()
    tasks = [bench.submit(Ask(number, is_poison=number < 200)) for number in range(216)]
    bench.work()
    assert {status_of(task) for task in tasks[:200]} == {Status.INTERNAL}
    assert [task.result() for task in tasks[200:]] == list(range(200, 216))
    bench.run = lambda _: 1 // 0
    bench.batches.clear()
    tasks = [bench.submit(Ask(number)) for number in range(216)]
    bench.work()
    assert {status_of(task) for task in tasks} == {Status.INTERNAL}
    assert len(bench.batches) == 2


def test_a_client_whose_query_failed_is_asked_alone_for_a_while(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()

    def ask_all(poison: bool) -> list[asyncio.Task[int]]:
        bench.batches.clear()
        asks = [(Ask(number, is_poison=poison and number == 2), f"client {number}") for number in range(4)]
        tasks = [bench.loop.create_task(bench.batcher.submit(ask, 1e9, client)) for ask, client in asks]
        bench.loop.settle()
        bench.work()
        return tasks

    assert status_of(ask_all(poison=True)[2]) is Status.INTERNAL
    for poison in (True, False):
        tasks = ask_all(poison)
        assert [tasks[number].result() for number in (0, 1, 3)] == [0, 1, 3]
        assert sorted(bench.batches) == [[0, 1, 3], [2]]
    bench.loop.advance(61)
    ask_all(poison=False)
    assert bench.batches == [[0, 1, 2, 3]]


@pytest.mark.parametrize("leaves", ["cancelled", "late"])
def test_a_long_query_that_nobody_waits_for_any_more_is_no_failure(
    make_bench: Callable[..., Bench], leaves: str
) -> None:
    """Others of its connection, which may be a proxy's, go on to be batched."""
    bench, client = make_bench(), "proxy"

    def run(queries: Sequence[Ask], pause: Any) -> list[int]:
        bench.batches.append([each.number for each in queries])
        if pause:
            if leaves == "cancelled":
                long.cancel()
            bench.loop.advance(2)
            pause()
        return answer(queries)

    batcher = Batcher("m", run, bench.executor, bench.config, clock=bench.loop.time)
    long = bench.loop.create_task(batcher.submit(Ask(9, num_ids=LONG_IDS + 1), bench.loop.now + 1, client))
    bench.loop.settle()
    bench.work()
    assert long.cancelled() if leaves == "cancelled" else status_of(long) is Status.DEADLINE
    tasks = [bench.loop.create_task(batcher.submit(Ask(number), 1e9, client)) for number in range(3)]
    bench.loop.settle()
    bench.work()
    assert [task.result() for task in tasks] == [0, 1, 2]
    assert bench.batches == [[9], [0, 1, 2]]


def test_errors_after_the_first_reach_a_client_late(make_bench: Callable[..., Bench]) -> None:
    """So it cannot ask what fails a thousand times a second; its deadline, and others' errors, are not held up."""
    bench = make_bench()

    def ask(client: str, seconds: float = 1e9, *, is_poison: bool = True) -> asyncio.Task[int]:
        deadline = bench.loop.now + seconds
        task = bench.loop.create_task(bench.batcher.submit(Ask(0, is_poison=is_poison), deadline, client))
        bench.loop.settle()
        bench.work()
        return task

    assert status_of(ask("mistaken")) is Status.INTERNAL
    again, hurried = ask("mistaken"), ask("mistaken", FAILED_SECONDS / 2)
    assert ask("mistaken", is_poison=False).result() == 0
    assert status_of(ask("another")) is Status.INTERNAL
    bench.loop.advance(FAILED_SECONDS * 0.9)
    assert status_of(hurried) is Status.DEADLINE
    assert not again.done()
    bench.loop.advance(FAILED_SECONDS * 0.2)
    assert status_of(again) is Status.INTERNAL


def test_in_the_pauses_of_a_long_query_short_ones_of_all_models_are_answered(make_bench: Callable[..., Bench]) -> None:
    """Until nobody waits for it: then it is ended."""
    bench = make_bench()
    runs: list[tuple[str, Any]] = []
    others: list[Batcher] = []

    def batcher(name: str) -> Batcher:
        def run(queries: Sequence[Ask], pause: Any) -> list[int]:
            for part in range(3 if pause else 1):
                if part:
                    submitted.append(bench.submit(Ask(part), to=others[part % 2]))
                    pause()
                runs.append((name, [each.number for each in queries]))
                bench.loop.advance(1)
            return answer(queries)

        return Batcher(name, run, bench.executor, bench.config, clock=bench.loop.time, others=lambda: others)

    others += [batcher("a"), batcher("b")]
    submitted: list[asyncio.Task[int]] = []
    long = Ask(7, num_ids=LONG_IDS + 1)
    submitted += [bench.submit(long, to=others[0]), bench.submit(long, 6.5, to=others[0])]
    bench.work()
    part, short = ("a", [7]), [("b", [1]), ("a", [2])]
    assert runs == [part, short[0], part, short[1], part, part, short[0], part, short[1]]
    assert [task.result() for task in submitted if task is not submitted[1]] == [7, 1, 2, 1, 2]
    assert status_of(submitted[1]) is Status.DEADLINE
    for each in others:
        each.check_integrity()


@pytest.mark.parametrize("failure", ["short", "exit", "invalid", "gone"])
def test_whatever_run_does_its_queries_are_answered(
    make_bench: Callable[..., Bench], failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says of one query is passed on to that alone, and of a model that is gone to all who wait."""

    def run(queries: Sequence[Ask]) -> list[int]:
        if failure == "exit":
            raise SystemExit(3)
        if failure == "gone":
            raise ServeError(Status.UNAVAILABLE, "model 'm' has changed with the version; ask again")
        if failure == "invalid" and any(each.number == 1 for each in queries):
            raise ServeError(Status.INVALID, "input 'ids': 99 is out of range")
        return answer(queries) if failure == "invalid" else []

    bench = make_bench(run)
    tasks = [bench.submit(Ask(number)) for number in range(3)]
    bench.work()
    status = {"invalid": Status.INVALID, "gone": Status.UNAVAILABLE}.get(failure, Status.INTERNAL)
    failed = [task for task in tasks if task.exception() is not None]
    assert {status_of(task) for task in failed} == {status}
    assert failed == (tasks[1:2] if failure == "invalid" else tasks)
    assert failure != "gone" or len(bench.batches) == 1
    assert len(caplog.records) == (status is Status.INTERNAL)
    bench.run = answer
    good = bench.submit(Ask(1))
    bench.work()
    assert good.result() == 1


def test_the_observer_hears_of_each_batch(make_bench: Callable[..., Bench]) -> None:
    heard: list[tuple[Any, ...]] = []

    bench = make_bench()
    batcher = bench.another("n", observer=lambda *what: heard.append(what))
    bench.submit(Ask(0, 2), to=batcher)
    bench.loop.advance(0.5)
    bench.submit(Ask(1, 3), to=batcher)
    bench.run = lambda queries: (bench.loop.advance(0.25), answer(queries))[1]
    bench.work()
    assert heard == [("n", 2, 5, [0.5, 0.0], 0.25)]


@pytest.mark.parametrize("cancel_jobs", [False, True])
def test_an_executor_that_is_shut_down_first_leaves_nobody_waiting(
    make_bench: Callable[..., Bench], cancel_jobs: bool
) -> None:
    bench = make_bench()
    tasks = [bench.submit(Ask(0))] if cancel_jobs else []
    bench.executor.shutdown(cancel_futures=cancel_jobs)
    bench.loop.settle()
    tasks.append(bench.submit(Ask(1)))
    assert {status_of(task) for task in tasks} == {Status.UNAVAILABLE}
    bench.loop.run_until_complete(bench.batcher.drain(0))


# Of several stores.


def test_batches_take_turns_and_others_run_while_one_pauses() -> None:
    turn, ran = threading.Lock(), list[str]()
    has_begun, may_pause = threading.Event(), threading.Event()

    def other() -> None:
        assert has_begun.wait(5)
        may_pause.set()
        with turn:
            ran.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with turn:
        has_begun.set()
        assert may_pause.wait(5)
        thread.join(0.05)
        ran.append("part")
        between(turn, thread.join)()
        ran.append("part")
    assert ran == ["part", "other", "part"]


def test_a_pause_that_fails_keeps_the_turn_until_its_batch_ends() -> None:
    turn = threading.Lock()

    def fail() -> None:
        raise ValueError

    with suppress(ValueError), turn:
        between(turn, fail)()
    with turn:
        assert not turn.acquire(blocking=False)
