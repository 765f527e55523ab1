"""Who waits for a batch, in order of arrival, within bounds."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..config import ServeConfig
from ..messages import ServeError, Status

__all__ = ["Waiter", "WaitingLine"]


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


class WaitingLine:
    """First come, first served. Not locked: its owner holds a lock.

    Args:
        model: name for messages.
        config: bounds of what waits.

    Attributes:
        num_samples: of all who wait.
    """

    def __init__(self, model: str, config: ServeConfig) -> None:
        self._model = model
        self._config = config
        # Any of them may leave at any time, and leaves nothing behind: so not a deque.
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.num_samples = 0

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def oldest(self) -> Waiter:
        """Who waits for longest; StopIteration if nobody does."""
        return next(iter(self._waiters))

    def enter(self, waiter: Waiter) -> None:
        """Join the end.

        Raises:
            ServeError: OVERLOADED; names the bound.
        """
        if len(self) >= self._config.max_queue_requests:
            raise self._full(f"{len(self)} requests wait already", "max_queue_requests")
        if self.num_samples + waiter.num_samples > self._config.max_queue_samples:
            many = f"{self.num_samples} samples wait already and {waiter.num_samples} more came"
            raise self._full(many, "max_queue_samples")
        self._waiters[waiter] = None
        self.num_samples += waiter.num_samples

    def _full(self, what: str, bound: str) -> ServeError:
        limit = getattr(self._config, bound)
        return ServeError(Status.OVERLOADED, f"model {self._model!r}: {what}, {bound} is {limit}; try again later")

    def leave(self, waiter: Waiter) -> None:
        """Wait no longer; nothing happens if the waiter was taken from the line."""
        if waiter in self._waiters:
            del self._waiters[waiter]
            self.num_samples -= waiter.num_samples

    def take(self, max_samples: int, now: float) -> list[Waiter]:
        """Take a batch from the front, up to the first that does not fit. Who is late or gone is dropped."""
        taken: list[Waiter] = []
        room = max_samples
        while self._waiters:
            waiter = self.oldest
            is_waited_for = waiter.deadline > now and not waiter.future.done()
            if is_waited_for and waiter.num_samples > room:
                break
            self.leave(waiter)
            if is_waited_for:
                room -= waiter.num_samples
                taken.append(waiter)
        return taken

    def check_integrity(self) -> None:
        """AssertionError if the books do not balance."""
        counted = sum(waiter.num_samples for waiter in self._waiters)
        assert counted == self.num_samples, f"{counted} samples wait, {self.num_samples} are counted"
        assert counted <= self._config.max_queue_samples, f"{counted} samples wait"
        assert len(self) <= self._config.max_queue_requests, f"{len(self)} wait"
        assert not any(waiter.future.done() for waiter in self._waiters), "someone waits whose caller has gone"
