"""The end of what nobody closed: work that a finalizer hands over, as it may neither wait nor take a lock itself.

The garbage collector runs in any thread, at any allocation, whatever locks that thread holds: also in one that a
``close`` would wait for. So a finalizer hands the close over to a thread of its own. Until that is done, something else
must refer to the parts that it closes: the collector has cleared the weak references to all that it found, and by such
a reference an executor's threads know their executor.
"""

import _thread
import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from .flag import Flag

_LOG: Final = logging.getLogger("tierstore")

Work = Callable[[], object]


class _Closing:
    """Work that was handed over; ``is_begun``: a thread does it."""

    def __init__(self, work: Work) -> None:
        self._work = [work]
        self.is_begun = False
        self.is_done = Flag()

    def begin(self) -> None:
        """Start a thread for it. In a thread that holds no lock: ``Thread.start`` takes some, and waits."""
        try:
            threading.Thread(target=self.run, name="tierstore-dropped", daemon=True).start()
        except RuntimeError:  # the interpreter has begun to end since this thread was started
            self.run()

    def run(self) -> None:
        """Do it, and keep nothing of it."""
        try:
            self._work.pop()()
        except Exception:
            _LOG.warning("what was dropped could not be closed", exc_info=True)
        finally:
            _CLOSING.remove(self)
            self.is_done.set()


class _Collector:
    """Told by Python of the garbage collector; ``thread`` that it runs in, 0 while it does not run."""

    thread = 0

    def note(self, phase: str, _: dict[str, Any]) -> None:
        self.thread = threading.get_ident() if phase == "start" else 0


_CLOSING: Final[deque[_Closing]] = deque()
_COLLECTOR: Final = _Collector()
gc.callbacks.append(_COLLECTOR.note)
os.register_at_fork(after_in_child=_CLOSING.clear)


def hand_over(work: Work) -> None:
    """Have it done soon, in another thread; for finalizers, as this neither waits nor takes a lock. Exceptions are
    logged."""
    closing = _Closing(work)
    _CLOSING.append(closing)
    with contextlib.suppress(RuntimeError):  # no more threads now, or as the interpreter ends
        _thread.start_new_thread(closing.begin, ())
        closing.is_begun = True


def finish(work: Work) -> None:
    """Do it; hand it over, where the garbage collector or the end of the interpreter is what asks for it."""
    if _COLLECTOR.thread == threading.get_ident() or sys.is_finalizing():
        hand_over(work)
    else:
        work()


def settle(seconds: float) -> None:
    """Wait until all is done that was handed over before, or so long; do what no thread could be had for."""
    deadline = time.monotonic() + seconds
    for closing in list(_CLOSING):
        if closing.is_begun:
            closing.is_done.wait(max(0.0, deadline - time.monotonic()))
        else:
            closing.run()
