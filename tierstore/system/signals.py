"""Putting Ctrl-C off while bookkeeping is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: after a kernel reserved slots and before
anyone noted which, say, or while numba compiles one, whose lock then stays taken. Operations that must be whole run
shielded: the signal's handler runs when they end.
"""

import _signal  # type: ignore[import-not-found, unused-ignore]
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

SIGNALS: Final = (int(signal.SIGINT), int(signal.SIGTERM))

P = ParamSpec("P")
R = TypeVar("R")


class Shield:
    """While entered in the main thread, SIGINT and SIGTERM wait; their handlers run at the exit."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    # By what the module signal wraps: that turns numbers into enum members and back, 20 us a shield.

    def __enter__(self) -> "Shield":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):  # the system's own default, or one set outside Python, stays
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
        for number, frame in self._arrived:
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))


def shielded(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run whole."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Shield():
            return function(*args, **kwargs)

    return run
