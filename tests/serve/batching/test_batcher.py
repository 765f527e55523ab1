"""Dynamic batching, case by case; test_states.py has the random interleavings."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serve.batching.test_states import SteppedExecutor, SteppedLoop
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
    if any(each.is_poison for each in queries):
        raise ArithmeticError("the secret of the model")
    return [each.number for each in queries]


class Bench:
    """A batcher that moves step by step, and the batches that it ran."""

    def __init__(self) -> None:
        self.loop, self.executor = SteppedLoop(), SteppedExecutor()
        self.config = ServeConfig(store="x")
        self.batches: list[list[int]] = []
        self.run: Callable[[Sequence[Ask]], list[int]] = answer
        self.batcher = self.another("m", self.note)

    def another(self, name: str, run: Any, **options: Any) -> Batcher:
        return Batcher(name, run, self.executor, self.config, clock=self.loop.time, **options)

    def note(self, queries: Sequence[Ask], _pause: Any) -> list[int]:
        self.batches.append([each.number for each in queries])
        return self.run(queries)

    def submit(
        self, ask: Ask, seconds: float = 1e9, *, to: Batcher | None = None, client: str = ""
    ) -> asyncio.Task[int]:
        task = self.loop.create_task((to or self.batcher).submit(ask, self.loop.now + seconds, client))
        self.loop.settle()
        return task

    def work(self) -> None:
        while self.executor.jobs:
            self.executor.run_next()
        self.loop.settle()


@pytest.fixture
def bench() -> Iterator[Bench]:
    logs._failures.clear()  # of a model of the same name
    made = Bench()
    yield made
    made.batcher.close()
    made.loop.settle()
    made.batcher.check_integrity()
    assert not asyncio.all_tasks(made.loop)
    made.loop.close()


def status_of(task: asyncio.Task[int]) -> Status:
    error = task.exception()
    assert isinstance(error, ServeError)
    return error.status


def test_models_take_turns(bench: Bench) -> None:
    second = bench.another("n", bench.note)
    for number in range(4):
        bench.submit(Ask(number, bench.config.max_batch_samples))
    for number in range(10, 12):
        bench.submit(Ask(number, bench.config.max_batch_samples), to=second)
    bench.executor.submit(lambda: bench.batches.append([-1]))
    bench.work()
    assert bench.batches == [[0], [10], [-1], [1], [11], [2], [3]]


def test_good_queries_are_answered_however_many_are_bad(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """If the model has answered anything before; one that never has, or has stopped to, is not asked for ever."""
    tasks = [bench.submit(Ask(number, is_poison=True)) for number in range(1000)]
    bench.work()
    assert {status_of(task) for task in tasks} == {Status.INTERNAL}
    assert len(bench.batches) <= MAX_FAILED_RUNS + 10
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "1000 of 1000" in record.message
    assert "secret" in str(record.exc_info[1])
    assert "secret" not in str(tasks[0].exception())
    bench.submit(Ask(-1))
    bench.work()
    for poisoned, runs in ((range(200), None), (range(2777, 2778), 26)):
        bench.batches.clear()
        tasks = [bench.submit(Ask(number, is_poison=number in poisoned)) for number in range(4096 if runs else 216)]
        bench.work()
        assert [number for number, task in enumerate(tasks) if task.exception()] == list(poisoned)
        assert all(number in poisoned or task.result() == number for number, task in enumerate(tasks))
        assert runs is None or len(bench.batches) <= runs, "halves of halves"
    bench.run = lambda _: [1 // 0]
    bench.batches.clear()
    tasks = [bench.submit(Ask(number)) for number in range(216)]
    bench.work()
    assert {status_of(task) for task in tasks} == {Status.INTERNAL}
    assert len(bench.batches) == 2


def test_a_client_whose_query_failed_is_asked_alone_for_a_while(bench: Bench) -> None:
    def ask_all(poison: bool) -> list[asyncio.Task[int]]:
        bench.batches.clear()
        tasks = [
            bench.submit(Ask(number, is_poison=poison and number == 2), client=f"client {number}")
            for number in range(4)
        ]
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


def test_errors_after_the_first_reach_a_client_late(bench: Bench) -> None:
    """So it cannot ask what fails a thousand times a second; its deadline, and others' errors, are not held up."""

    def ask(client: str, seconds: float = 1e9, *, is_poison: bool = True) -> asyncio.Task[int]:
        task = bench.submit(Ask(0, is_poison=is_poison), seconds, client=client)
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


def test_in_the_pauses_of_a_long_query_short_ones_of_all_models_are_answered(bench: Bench) -> None:
    """Until nobody waits for it: then it is ended."""
    runs: list[tuple[str, Any]] = []
    others: list[Batcher] = []
    submitted: list[asyncio.Task[int]] = []

    def batcher(name: str) -> Batcher:
        def run(queries: Sequence[Ask], pause: Any) -> list[int]:
            for part in range(3 if pause else 1):
                if part:
                    submitted.append(bench.submit(Ask(part), to=others[part % 2]))
                    pause()
                runs.append((name, [each.number for each in queries]))
                bench.loop.advance(1)
            return answer(queries)

        return bench.another(name, run, others=lambda: others)

    others += [batcher("a"), batcher("b")]
    long = Ask(7, num_ids=LONG_IDS + 1)
    submitted += [bench.submit(long, to=others[0]), bench.submit(long, 6.5, to=others[0])]
    bench.work()
    part, short = ("a", [7]), [("b", [1]), ("a", [2])]
    assert runs == [part, short[0], part, short[1], part, part, short[0], part, short[1]]
    assert [task.result() for task in submitted if task is not submitted[1]] == [7, 1, 2, 1, 2]
    assert status_of(submitted[1]) is Status.DEADLINE
    bench.executor.shutdown()
    assert status_of(bench.submit(Ask(1))) is Status.UNAVAILABLE


@pytest.mark.parametrize("failure", ["short", "exit", "invalid", "gone"])
def test_whatever_run_does_queries_are_answered(bench: Bench, failure: str, caplog: pytest.LogCaptureFixture) -> None:
    """What it says of one query is passed on to that alone, and of a model that is gone to all who wait."""

    def run(queries: Sequence[Ask]) -> list[int]:
        if failure == "exit":
            raise SystemExit(3)
        if failure == "gone":
            raise ServeError(Status.UNAVAILABLE, "model 'm' has changed with the version; ask again")
        if failure == "invalid" and any(each.number == 1 for each in queries):
            raise ServeError(Status.INVALID, "input 'ids': 99 is out of range")
        return answer(queries) if failure == "invalid" else []

    bench.run = run
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


def test_batches_of_several_stores_take_turns_and_others_run_while_one_pauses() -> None:
    """A pause that fails keeps the turn."""
    turn, ran = threading.Lock(), list[str]()

    def other() -> None:
        with turn:
            ran.append("other")

    thread = threading.Thread(target=other)
    with turn:
        thread.start()
        ran.append("part")
        between(turn, thread.join)()
        ran.append("part")
        with pytest.raises(ZeroDivisionError):
            between(turn, lambda: 1 // 0)()  # type: ignore[arg-type, return-value]
        assert turn.locked()
    assert ran == ["part", "other", "part"]
