"""Ending one call, whose client accepts no answer.

gRPC offers a server no way to: a status waits behind the data, and the task that sends, when cancelled, leaves the call
as it is. But gRPC cancels a call that nothing refers to, and frees what it holds. Two tasks refer to a call: its
handler's, and that task's maker, which waits for the call's end. Both are cancelled here. Other calls of the connection
are not touched.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

_log = logging.getLogger(__name__)

_OWNER: Final = "_schedule_rpc_coro"
"""What runs in gRPC's task that makes the one of a handler."""


class _Task(asyncio.Task[Any]):
    """Knows the task that made it: ``maker`` refers to it, if a task did."""

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
    """The call under way whose handler is running. Refers to it weakly: it is not to last for that."""

    def __init__(self, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._peer: str = context.peer()
        self._task = weakref.ref(task)

    def when_over(self, then: Callable[[], object]) -> None:
        """Have something done once the call's task ends, which goes on to send the response."""
        task = self._task()
        assert task is not None
        task.add_done_callback(lambda _: then())

    def end_after(self, seconds: float) -> asyncio.TimerHandle:
        """End the call then, for server and client, whatever it is doing, unless the timer is cancelled."""
        return asyncio.get_running_loop().call_later(seconds, self._end, seconds)

    def _end(self, seconds: float) -> None:
        task = self._task()
        if task is None:
            return
        _log.warning("%s accepted no answer for %g seconds: its call is ended", self._peer, seconds)
        owner = task.maker() if isinstance(task, _Task) and task.maker else None
        if owner is not None and getattr(owner.get_coro(), "__qualname__", "") == _OWNER:
            owner.cancel()
        else:
            _log.warning("a call of %s cannot be ended with this version of gRPC", self._peer)
        task.cancel()
