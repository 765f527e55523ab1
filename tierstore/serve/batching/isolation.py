"""A batch that fails is run again in halves, so that a query that makes it fail does so alone.

Before that the model is asked what it answered before: if that fails too, so does the batch.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from ..base import LONG_IDS
from ..messages import ServeError, Status

MAX_FAILED_RUNS: Final = 64
"""Of one batch, after which the rest fails unasked, if the model has never answered anything."""
_LOG_SECONDS: Final = 1.0
"""Between two lines of a model, each with a traceback."""

_logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers of a batch's queries, one for each, in their order."""


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


class Isolation:
    """Runs one model's batches, in one thread. Failures are logged once a second, with a traceback; ServeErrors are
    answers."""

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._answered: Any = None  # a query that the model has answered
        self._quiet_until = -math.inf
        self._num_unlogged = 0

    def run(self, run: Run, waiters: Sequence[Waiter]) -> list[Attempt]:
        """Run a batch, again in halves as long as it fails; each query still wanted is in one attempt, in order."""
        finished: list[Attempt] = []
        fault: BaseException | None = None
        waiting = [waiters]
        num_failed, is_sound = 0, None  # whether the model answers anything; None: unknown
        while waiting:
            group = [waiter for waiter in waiting.pop() if not waiter.future.done()]
            if not group:
                continue
            attempt = _attempt(run, group, self._clock)
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
                is_sound = self._is_sound(run)
            is_hopeless = is_sound is False or (is_sound is None and num_failed >= MAX_FAILED_RUNS)
            if len(group) == 1 or is_hopeless or is_no_querys_fault(attempt.error):
                finished.append(attempt)
            else:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]
        if fault is not None:  # the last is of few queries, so it tells most about the cause
            self._log(sum(len(each.waiters) for each in finished if each.error is not None), len(waiters), fault)
        return finished

    def _is_sound(self, run: Run) -> bool | None:
        """Whether the model answers again what it has answered before; None if that was nothing."""
        if self._answered is None:
            return None
        try:
            run([self._answered])
        except BaseException:  # as of any other query
            return False
        return True

    def _log(self, num_failed: int, num_queries: int, fault: BaseException) -> None:
        now = self._clock()
        if now < self._quiet_until:
            self._num_unlogged += 1
            return
        fields = {"suppressed": self._num_unlogged} if self._num_unlogged else {}
        self._quiet_until, self._num_unlogged = now + _LOG_SECONDS, 0
        message = "model %r: %d of %d queries of a batch failed"
        _logger.error(message, self._model, num_failed, num_queries, exc_info=fault, extra=fields)
