"""Putting Python's signal handlers off while bookkeeping is half done, and an event that they cannot break.

Python runs a signal's handler between any two bytecodes of the main thread: after a kernel reserved slots and before
these were noted, or while numba holds its lock. A handler may raise there, as that of Ctrl-C does, or that of torch's
DataLoader where a worker died. Operations that must be whole run shielded: handlers run when they end.
"""

import _signal  # type: ignore[import-not-found, unused-ignore]
import _thread
import contextlib
import ctypes
import functools
import itertools
import logging
import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, ParamSpec, Self, TypeVar

_LOG: Final = logging.getLogger("tierstore")
P = ParamSpec("P")
R = TypeVar("R")

# By what the module signal wraps: that turns numbers into enum members and back, 20 us a shield.
_get: Final[Callable[[int], Any]] = _signal.getsignal
_set: Final[Callable[[int, Any], Any]] = _signal.signal
_NUMBERS: Final = tuple(sorted(map(int, signal.valid_signals())))
_TURN_SECONDS: Final = 0.1
_call_each: Final = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in C, where no handler runs between two of its steps."""


class _Deferred:
    """A signal's handler that waits while the main thread is shielded, and else is as the one it stands for."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _MAIN.is_shielded:
            _MAIN.arrived.append(itertools.starmap(self.handler, [(number, frame)]))
        else:
            self.handler(number, frame)


class _Main:
    """Of the main thread. ``arrived``: handlers that wait, each as an iterator that runs it, once; ``handlers``: of
    each signal in ``_NUMBERS``, as last seen; ``deferred``: of those in Python number, deferred handler, handler."""

    def __init__(self) -> None:
        self.handlers: tuple[Any, ...] = ()
        self.deferred: tuple[tuple[int, _Deferred, Any], ...] = ()
        self.begin()

    def begin(self) -> None:
        """Also in a forked process, whose main thread is the one that forked."""
        self.ident = threading.main_thread().ident
        self.is_shielded = False
        self.arrived: list[Iterator[Any]] = []

    def look(self, handlers: tuple[Any, ...]) -> None:
        """Take note of handlers that were set since."""
        found: list[tuple[int, _Deferred, Any]] = []
        for number, handler in zip(_NUMBERS, handlers, strict=True):
            if callable(handler):  # the system's own default, or one set outside Python, stays
                deferred = handler if isinstance(handler, _Deferred) else _Deferred(handler)
                found.append((number, deferred, deferred.handler))
        self.deferred = tuple(found)
        self.handlers = handlers


def shielded(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run whole: while the main thread is in it, Python's signal handlers wait. They run at its end. A
    handler that is set within is not deferred."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _MAIN.is_shielded or _thread.get_ident() != _MAIN.ident:  # by this thread, or this one runs no handlers
            return function(*args, **kwargs)
        handlers = tuple(map(_get, _NUMBERS))
        if handlers != _MAIN.handlers:
            _MAIN.look(handlers)
        deferred = _MAIN.deferred
        for number, waiting, _ in deferred:
            _set(number, waiting)
        try:
            _MAIN.is_shielded = True
            return function(*args, **kwargs)
        finally:
            _MAIN.is_shielded = False
            try:
                for number, waiting, handler in deferred:
                    if _get(number) is waiting:  # else it was set meanwhile
                        _set(number, handler)
            finally:
                if _MAIN.arrived:
                    _run_arrived()

    return run


def _run_arrived() -> None:
    """Run all handlers that waited, whichever raise; the last error is raised."""
    try:
        _call_each(itertools.chain.from_iterable(_MAIN.arrived))
    except BaseException:
        _run_arrived()
        raise
    _MAIN.arrived.clear()


def turns(seconds: float = math.inf) -> Iterator[float]:
    """Lengths of short waits, together so long, where all is whole: between them handlers run that a shield puts off,
    and may end it all by raising."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, _TURN_SECONDS)
        if _MAIN.is_shielded and _thread.get_ident() == _MAIN.ident and _MAIN.arrived:
            _run_arrived()


@contextlib.contextmanager
def handlers_restored(*numbers: int) -> Iterator[None]:
    """At its end these signals have the handlers again that they have now, unless those were set outside Python."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the system send this process a signal once its parent, or the thread that started it, ends, however."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


_MAIN: Final = _Main()
os.register_at_fork(after_in_child=_MAIN.begin)


class Flag:
    """As ``threading.Event``: a handler that raises within any call leaves no lock taken, and one that calls ``set``
    itself does not wait for the call that it interrupted. One that is cleared has one thread that waits."""

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wakes.put(None)

    def clear(self) -> None:
        self._is_set = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._wakes.get_nowait()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is set, or so long; whether it is set."""
        with contextlib.suppress(queue.Empty):
            while not self._is_set:
                self._wakes.get(timeout=seconds)
            self._wakes.put(None)  # for another who waits
        return self._is_set


# Objects dropped without being closed: a thread closes them. CPython drops an exception that is raised where an object
# ends (``__del__``, callbacks of weak references and of the garbage collector); and the collector runs in any thread,
# at any allocation, whatever locks that thread holds. So no Python code runs there: the object is put into a queue, by
# a method in C, and a thread closes it.


def _close(dropped: Any) -> None:
    try:
        dropped.close()
    except Exception:
        _LOG.warning("what was dropped could not be closed", exc_info=True)


class _Collector:
    """Has closed what was dropped, each in a thread, as it may wait. ``thread``: which takes what is dropped; or 0."""

    def __init__(self) -> None:
        self.dropped: Final[queue.SimpleQueue[Any]] = queue.SimpleQueue()
        self.begin()

    def begin(self) -> None:
        """Also in a forked process, which has none of the threads."""
        self.thread = 0
        self.closing: list[threading.Thread] = []
        self._starting = threading.RLock()

    def start(self) -> None:
        with self._starting, contextlib.suppress(RuntimeError):  # no more threads now, or as the interpreter ends
            if not self.thread:
                thread = threading.Thread(target=self._take_all, name="tierstore-dropped", daemon=True)
                thread.start()
                self.thread = thread.ident or 0

    def _take_all(self) -> None:
        while True:
            self.take(self.dropped.get())

    def take(self, dropped: Any) -> None:
        """Begin to close it; of a flag, say that all before it was taken."""
        if isinstance(dropped, Flag):
            dropped.set()
            return
        thread = threading.Thread(target=_close, args=[dropped], name="tierstore-closing", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            _close(dropped)
        else:
            self.closing = [*(each for each in self.closing if each.is_alive()), thread]


_COLLECTOR: Final = _Collector()
os.register_at_fork(after_in_child=_COLLECTOR.begin)
_method: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(("PyInstanceMethod_New", ctypes.pythonapi))


class ClosedWhenDropped:
    """Has ``close``, which a thread calls once nobody refers to the object; again is fine, and in part of one."""

    __del__: Any = _method(_COLLECTOR.dropped.put)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        _COLLECTOR.start()
        return super().__new__(cls)


def settle(seconds: float) -> None:
    """Wait until all is closed that was dropped before, or so long."""
    if threading.current_thread() in _COLLECTOR.closing:
        return  # it would wait for itself
    deadline = time.monotonic() + seconds
    if _COLLECTOR.thread:
        _COLLECTOR.dropped.put(reached := Flag())
        for part in turns(seconds):
            if reached.wait(part):
                break
    else:
        with contextlib.suppress(queue.Empty):
            while True:
                _COLLECTOR.take(_COLLECTOR.dropped.get_nowait())
    for thread in _COLLECTOR.closing:
        for part in turns(deadline - time.monotonic()):
            thread.join(part)
            if not thread.is_alive():
                break
