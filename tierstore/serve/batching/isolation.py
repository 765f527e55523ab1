"""A batch that fails is run again in halves, so that a query that makes it fail does so alone."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ..base import Outputs
from ..messages import ServeError, Status
from .waiting import Waiter

__all__ = ["MAX_SPLIT_RUNS", "Attempt", "BatchResult", "Run", "concerns_all", "run_isolated"]

MAX_SPLIT_RUNS: Final = 64
"""Runs of one batch after which what fails is not halved any more. To find one bad query among 4,096 takes 25; a model
that always fails is not to be asked 8,191 times."""

_logger = logging.getLogger(__name__)


class BatchResult(NamedTuple):
    """What a batch gave.

    Attributes:
        version: of the store, that all of the batch ran at.
        outputs: one for each query, in their order.
    """

    version: str
    outputs: list[Outputs]


Run: TypeAlias = Callable[[Sequence[Any]], BatchResult]


class Attempt(NamedTuple):
    """The last run of some queries; either a result or an error."""

    waiters: Sequence[Waiter]
    result: BatchResult | None
    error: BaseException | None
    seconds: float


def concerns_all(error: BaseException | None) -> bool:
    """Whether a run would have failed so with any queries: the model is not there any more."""
    return isinstance(error, ServeError) and error.status is Status.UNAVAILABLE


def _attempt(run: Run, waiters: Sequence[Waiter], clock: Callable[[], float]) -> Attempt:
    started = clock()
    try:
        result = run([waiter.query for waiter in waiters])
        if len(result.outputs) != len(waiters):
            raise RuntimeError(f"{len(result.outputs)} outputs came back for {len(waiters)} queries")
    # Whatever it is, somebody waits for an answer, and the thread has other batches to run.
    except BaseException as error:
        return Attempt(waiters, None, error, clock() - started)
    return Attempt(waiters, result, None, clock() - started)


def run_isolated(model: str, run: Run, waiters: Sequence[Waiter], clock: Callable[[], float]) -> list[Attempt]:
    """Run a batch, again in halves as long as it fails; each query that is still wanted is in one attempt, in order.

    Failures are logged once a batch, with one traceback; a ``ServeError`` is an answer and is not.
    """
    finished: list[Attempt] = []
    errors: list[BaseException] = []
    waiting = [waiters]
    num_runs = 0
    while waiting:
        group = [waiter for waiter in waiting.pop() if waiter.is_wanted]
        if not group:
            continue
        attempt = _attempt(run, group, clock)
        num_runs += 1
        if attempt.error is None:
            finished.append(attempt)
            continue
        if not isinstance(attempt.error, ServeError):
            errors.append(attempt.error)
        if len(group) == 1 or num_runs >= MAX_SPLIT_RUNS or concerns_all(attempt.error):
            finished.append(attempt)
        else:
            middle = len(group) // 2
            waiting += [group[middle:], group[:middle]]
    if errors:
        _log_failures(model, len(waiters), finished, errors)
    return finished


def _log_failures(model: str, num_queries: int, attempts: list[Attempt], errors: list[BaseException]) -> None:
    num_failed = sum(len(attempt.waiters) for attempt in attempts if attempt.error is not None)
    # The last error is of few queries, so it tells most about the cause.
    _logger.error("model %r: %d of %d queries of a batch failed", model, num_failed, num_queries, exc_info=errors[-1])
