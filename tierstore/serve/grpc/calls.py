"""Ending one call, whose client accepts no answer.

gRPC offers a server no way to: a status waits behind the data, and the task that sends, when cancelled, leaves the call
as it is. But gRPC cancels a call that nothing refers to, and frees what it holds. Two tasks refer to a call: its
handler's, and that task's maker, which waits for the call's end. Both are cancelled here. Other calls of the connection
are not touched.
"""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

_log = logging.getLogger(__name__)

_MAKER: Final = "_schedule_rpc_coro"
"""What runs in gRPC's task that makes the one of a handler. Its variables are in an object that it refers to."""
_makers: Final[weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.ref[asyncio.Task[Any]]]] = (
    weakref.WeakKeyDictionary()
)
"""Of the handlers' tasks that there were when one was last looked for. Tasks that note their own maker would cost each
call more, and few calls are ended here."""


def _maker_of(task: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """gRPC's task that made a handler's; None if this gRPC has none. All are looked for at once."""
    if task not in _makers:
        for maker in asyncio.all_tasks():
            coroutine = maker.get_coro()
            if getattr(coroutine, "__qualname__", "") == _MAKER:
                for each in gc.get_referents(*gc.get_referents(coroutine)):
                    if isinstance(each, asyncio.Task):
                        _makers[each] = weakref.ref(maker)
    found = _makers.get(task)
    return None if found is None else found()


class Call:
    """The call in flight whose handler is running. Refers to it weakly: it is not to last for that."""

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
        maker = _maker_of(task)
        if maker is not None:
            maker.cancel()
        else:
            _log.warning("a call of %s cannot be ended with this version of gRPC", self._peer)
        task.cancel()
