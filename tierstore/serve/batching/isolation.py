"""A batch that fails is run again in halves, so that a query that makes it fail does so alone."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from ..messages import ServeError, Status

MAX_SPLIT_RUNS: Final = 64
"""Runs of one batch after which what fails is not halved any more. To find one bad query among 4,096 takes 25; a model
that always fails is not to be asked 8,191 times."""

_logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers of a batch's queries, one for each, in their order."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A query from its arrival until its caller has gone.

    Attributes:
        future: what the caller awaits; it belongs to the event loop, and is done once nobody waits for the answer.
        entered, deadline: seconds on the batcher's clock.
    """

    query: Any
    num_samples: int
    future: asyncio.Future[Any]
    entered: float
    deadline: float


class Attempt(NamedTuple):
    """The last run of some queries: their answers, or an error."""

    waiters: Sequence[Waiter]
    answers: Sequence[Any]
    error: BaseException | None
    seconds: float


def concerns_all(error: BaseException | None) -> bool:
    """Whether a run would have failed so with any queries: the model is not there any more."""
    return isinstance(error, ServeError) and error.status is Status.UNAVAILABLE


def _attempt(run: Run, waiters: Sequence[Waiter], clock: Callable[[], float]) -> Attempt:
    started = clock()
    try:
        answers = run([waiter.query for waiter in waiters])
        if len(answers) != len(waiters):
            raise RuntimeError(f"{len(answers)} outputs came back for {len(waiters)} queries")
    # Whatever it is, somebody waits for an answer, and the thread has other batches to run.
    except BaseException as error:
        return Attempt(waiters, (), error, clock() - started)
    return Attempt(waiters, answers, None, clock() - started)


def run_isolated(model: str, run: Run, waiters: Sequence[Waiter], clock: Callable[[], float]) -> list[Attempt]:
    """Run a batch, again in halves as long as it fails; each query that is still wanted is in one attempt, in order.

    Failures are logged once a batch, with one traceback; a ``ServeError`` is an answer and is not.
    """
    finished: list[Attempt] = []
    fault: BaseException | None = None
    waiting = [waiters]
    num_runs = 0
    while waiting:
        group = [waiter for waiter in waiting.pop() if not waiter.future.done()]
        if not group:
            continue
        attempt = _attempt(run, group, clock)
        num_runs += 1
        if attempt.error is not None and not isinstance(attempt.error, ServeError):
            fault = attempt.error
        is_last = len(group) == 1 or num_runs >= MAX_SPLIT_RUNS or concerns_all(attempt.error)
        if attempt.error is None or is_last:
            finished.append(attempt)
        else:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
    if fault is not None:  # the last is of few queries, so it tells most about the cause
        num_failed = sum(len(attempt.waiters) for attempt in finished if attempt.error is not None)
        _logger.error("model %r: %d of %d queries of a batch failed", model, num_failed, len(waiters), exc_info=fault)
    return finished
