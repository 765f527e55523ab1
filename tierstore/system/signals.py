"""Putting Python's signal handlers off while bookkeeping is half done.

Python runs a signal's handler between any two bytecodes of the main thread: after a kernel reserved slots and before
anyone noted which, say, or while numba compiles one, whose lock then stays taken. A handler may raise there, as that of
Ctrl-C does, or that of torch's DataLoader where a worker died. Operations that must be whole run shielded: handlers run
when they end.
"""

import _signal  # type: ignore[import-not-found, unused-ignore]
import _thread
import functools
import itertools
import operator
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# By what the module signal wraps: that turns numbers into enum members and back, 20 us a shield.
_get: Final[Callable[[int], Any]] = _signal.getsignal
_set: Final[Callable[[int, Any], Any]] = _signal.signal
_NUMBERS: Final = tuple(sorted(map(int, signal.valid_signals())))
_call_each: Final = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in C, where no handler runs between two of its steps."""


class _Deferred:
    """A signal's handler that waits while the main thread is shielded, and else is as the one it stands for. So nothing
    is lost where it is left in place, as by a shield that another handler interrupted."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _MAIN.is_shielded:
            _MAIN.arrived.append((self.handler, number, frame))
        else:
            self.handler(number, frame)


class _Main:
    """Of the main thread.

    Attributes:
        ident: its number.
        is_shielded: whether handlers wait.
        arrived: those that wait, with their arguments.
        handlers: of each signal in ``_NUMBERS``, as last seen.
        deferred: number, handler as it is to be while shielded, and as it is to be after, of those in Python.
    """

    def __init__(self) -> None:
        self.handlers: tuple[Any, ...] = ()
        self.deferred: tuple[tuple[int, _Deferred, Any], ...] = ()
        self.begin()

    def begin(self) -> None:
        """Also in a forked process, whose main thread is the one that forked."""
        self.ident = threading.main_thread().ident
        self.is_shielded = False
        self.arrived: list[tuple[Any, int, FrameType | None]] = []

    def look(self, handlers: tuple[Any, ...]) -> None:
        """Take note of handlers that were set since."""
        found: list[tuple[int, _Deferred, Any]] = []
        for number, handler in zip(_NUMBERS, handlers, strict=True):
            if callable(handler):  # the system's own default, or one set outside Python, stays
                deferred = handler if isinstance(handler, _Deferred) else _Deferred(handler)
                found.append((number, deferred, deferred.handler))
        self.deferred = tuple(found)
        self.handlers = handlers


class Shield:
    """While entered in the main thread, Python's signal handlers wait; they run at the exit.

    A handler that is set within is not deferred. Handlers may interrupt entering and leaving: then those that arrived
    have run, or run when the next shield ends.
    """

    __slots__ = ("_deferred",)

    def __init__(self) -> None:
        self._deferred: tuple[tuple[int, _Deferred, Any], ...] | None = None

    def __enter__(self) -> "Shield":
        main = _MAIN
        if _thread.get_ident() == main.ident and not main.is_shielded:
            handlers = tuple(map(_get, _NUMBERS))
            if handlers != main.handlers:
                main.look(handlers)
            self._deferred = deferred = main.deferred
            for number, waiting, _ in deferred:
                _set(number, waiting)
            main.is_shielded = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        deferred = self._deferred
        if deferred is None:
            return
        try:
            for number, waiting, handler in deferred:
                if _get(number) is waiting:
                    _set(number, handler)
        finally:
            _MAIN.is_shielded = False
            if _MAIN.arrived:
                _run_arrived()


def _run_arrived() -> None:
    arrived, _MAIN.arrived = _MAIN.arrived, []
    _run(itertools.starmap(operator.call, arrived))


def _run(handlers: Iterator[Any]) -> None:
    """Run handlers, all of them, whichever raise; the last error is raised."""
    try:
        _call_each(handlers)
    except BaseException:
        _run(handlers)
        raise


def shielded(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run whole."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _MAIN.is_shielded:  # by this thread, or this one has nothing to wait for
            return function(*args, **kwargs)
        with Shield():
            return function(*args, **kwargs)

    return run


_MAIN: Final = _Main()
os.register_at_fork(after_in_child=_MAIN.begin)
