"""Who waits for a batch, in order of arrival, within bounds."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..messages import ServeError, Status

__all__ = ["Waiter", "WaitingLine"]


@dataclass(slots=True, eq=False)
class Waiter:
    """A query from its arrival until its caller has gone.

    Attributes:
        future: what the caller awaits; it belongs to the event loop.
        entered: seconds on the batcher's clock.
        deadline: likewise; infinity if there is none.
        is_wanted: False once nobody waits for the answer.
    """

    query: Any
    num_samples: int
    future: asyncio.Future[Any]
    entered: float
    deadline: float
    is_wanted: bool = True


class WaitingLine:
    """First come, first served. Not locked: its owner holds a lock.

    Args:
        model: name for messages.
        max_samples, max_requests: bounds of what waits.
    """

    def __init__(self, model: str, *, max_samples: int, max_requests: int) -> None:
        self._model = model
        self._max_samples = max_samples
        self._max_requests = max_requests
        # Any of them may leave at any time, and leaves nothing behind: so not a deque.
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._num_samples = 0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def oldest(self) -> Waiter:
        """Who waits for longest; StopIteration if nobody does."""
        return next(iter(self._waiters))

    def enter(self, waiter: Waiter) -> None:
        """Join the end.

        Raises:
            ServeError: OVERLOADED; names the bound.
        """
        if len(self._waiters) >= self._max_requests:
            self._refuse(f"{len(self._waiters)} requests wait already", "max_queue_requests", self._max_requests)
        if self._num_samples + waiter.num_samples > self._max_samples:
            many = f"{self._num_samples} samples wait already and {waiter.num_samples} more came"
            self._refuse(many, "max_queue_samples", self._max_samples)
        self._waiters[waiter] = None
        self._num_samples += waiter.num_samples

    def _refuse(self, what: str, bound: str, limit: int) -> None:
        raise ServeError(Status.OVERLOADED, f"model {self._model!r}: {what}, {bound} is {limit}; try again later")

    def leave(self, waiter: Waiter) -> None:
        """Nobody wants the answer any more; nothing happens to the line if the waiter was taken from it."""
        waiter.is_wanted = False
        if waiter in self._waiters:
            del self._waiters[waiter]
            self._num_samples -= waiter.num_samples

    def take(self, max_samples: int, now: float) -> list[Waiter]:
        """Take a batch from the front, up to the first that does not fit. Who is late or gone is dropped."""
        taken: list[Waiter] = []
        room = max_samples
        while self._waiters:
            waiter = self.oldest
            is_waited_for = waiter.deadline > now and not waiter.future.done()
            if is_waited_for and waiter.num_samples > room:
                break
            self._waiters.popitem(last=False)
            self._num_samples -= waiter.num_samples
            if is_waited_for:
                room -= waiter.num_samples
                taken.append(waiter)
        return taken

    def check_integrity(self) -> None:
        """AssertionError if the books do not balance."""
        counted = sum(waiter.num_samples for waiter in self._waiters)
        assert counted == self._num_samples, f"{counted} samples wait, {self._num_samples} are counted"
        assert 0 <= counted <= self._max_samples, f"{counted} samples wait, at most {self._max_samples} may"
        assert len(self._waiters) <= self._max_requests, f"{len(self._waiters)} wait, at most {self._max_requests} may"
        assert all(waiter.is_wanted for waiter in self._waiters), "someone waits whose caller has gone"
