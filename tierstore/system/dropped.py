"""Objects dropped without being closed: a thread closes them.

CPython drops an exception that is raised where an object ends (``__del__``, callbacks of weak references and of the
garbage collector). A signal's handler may raise wherever Python code runs. And the collector runs in any thread, at any
allocation, whatever locks that thread holds. So no Python code runs there: the object is put into a queue, by a method
in C, and a thread closes it.
"""

import contextlib
import ctypes
import logging
import os
import queue
import threading
import time
from typing import Any, Final, Self

from .signals import Flag, turns

_LOG: Final = logging.getLogger("tierstore")


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
        """Have the thread."""
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
