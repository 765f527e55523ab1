"""Calls that wait for their clients, which may never go on: each has its time, and all together are bounded.

gRPC offers a server no way to end one call whose answer the client does not read: a status waits behind the data, and
the task that sends, when cancelled, leaves the call as it is. But gRPC cancels a call that nothing refers to, and frees
what it holds. Two tasks refer to a call: its handler's, and that task's maker, which waits for the call's end. Both are
cancelled here. Other calls of the connection are not touched.

gRPC's loop also refers to the first call of all, and to the last until there is another. They give back their place at
once, but their memory only then, or when their connection ends.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Call", "Wait", "Waiting", "know_makers"]

_log = logging.getLogger(__name__)

_OWNER: Final = "_schedule_rpc_coro"
"""What runs in gRPC's task that makes the one of a handler."""


class _Task(asyncio.Task[Any]):
    """Knows the task that made it.

    Attributes:
        maker: refers to it, if a task did.
    """

    def __init__(self, coroutine: Any, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(coroutine, loop=loop, **options)
        maker = asyncio.current_task(loop)
        self.maker = weakref.ref(maker) if maker is not None else None


def know_makers(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Have the loop's tasks know what made them; before gRPC's server starts.

    Returns:
        What puts the task factory back that there was, unless another was set since.
    """

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> _Task:
        return _Task(coroutine, loop=loop, **options)

    def forget() -> None:
        if loop.get_task_factory() is make:
            loop.set_task_factory(before)

    before = loop.get_task_factory()
    loop.set_task_factory(make)
    return forget


class Call:
    """The call under way whose handler is running. Refers to it weakly: it is not to last for that.

    Attributes:
        peer: its connection.
    """

    def __init__(self, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.peer: str = context.peer()
        self._task = weakref.ref(task)

    def when_over(self, then: Callable[[], object]) -> None:
        """Have something done once the call's task ends, which goes on to send the response."""
        task = self._task()
        assert task is not None
        task.add_done_callback(lambda _: then())

    def end(self) -> None:
        """End it now, for server and client, whatever it is doing."""
        task = self._task()
        if task is None:
            return
        owner = task.maker() if isinstance(task, _Task) and task.maker else None
        if owner is not None and getattr(owner.get_coro(), "__qualname__", "") == _OWNER:
            owner.cancel()
        else:
            _log.warning("a call of %s cannot be ended with this version of gRPC", self.peer)
        task.cancel()


class Wait:
    """A call's wait for its client; ends the call when its time is up.

    Args:
        size: of what it holds meanwhile.
        then: is called once it is over, one way or the other.
    """

    def __init__(self, waiting: "Waiting", call: Call, size: int, then: Callable[[], object]) -> None:
        self._waiting = waiting
        self._then = then
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.call = call
        self.size = size

    def end_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        _log.warning("%s accepted no answer for %g seconds: its call is ended", self.call.peer, seconds)
        self.end()

    def over(self) -> None:
        """The client went on. May be called again."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.remove(self)
        self._then()

    def end(self) -> None:
        self.over()
        self.call.end()


class _Connection:
    def __init__(self) -> None:
        self.waits: dict[Wait, None] = {}  # those that have waited longest come first
        self.size = 0


class Waiting:
    """All calls that wait for one thing, by connection.

    Args:
        max_calls: if there is one more, one is ended: that which has waited longest on the connection that has most.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._num_calls = 0
        self._connections: dict[str, _Connection] = {}

    def begin(self, call: Call, *, size: int = 0, then: Callable[[], object] = lambda: None) -> Wait:
        """Count a call; the caller is to say when its wait is over."""
        wait = Wait(self, call, size, then)
        connection = self._connections.setdefault(call.peer, _Connection())
        connection.waits[wait] = None
        connection.size += size
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            most = max(self._connections.values(), key=lambda each: len(each.waits))
            next(iter(most.waits)).end()
        return wait

    def remove(self, wait: Wait) -> None:
        connection = self._connections[wait.call.peer]
        del connection.waits[wait]
        connection.size -= wait.size
        self._num_calls -= 1
        if not connection.waits:
            del self._connections[wait.call.peer]

    def make_room(self, peer: str, size: int) -> bool:
        """End a call of the connection whose calls hold most, if it has more than another would then have.

        Args:
            peer: the other.
            size: what it wants more.

        Returns:
            Whether one was ended.
        """
        most = max(self._connections.values(), key=lambda each: each.size, default=None)
        own = self._connections.get(peer)
        if most is None or most.size <= (own.size if own else 0) + size:
            return False
        next(wait for wait in most.waits if wait.size).end()
        return True
