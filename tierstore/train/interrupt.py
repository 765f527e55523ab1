"""Ctrl-C as a request: the step under way is finished and committed before the run stops."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]


class StopRequest:
    """While entered, the first SIGINT sets ``requested``; a second one interrupts as usual.

    Outside the main thread, where Python allows no signal handlers, it never is requested.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        # A plain write: a handler may run in the middle of any other output.
        sys.stderr.write("\nstopping after this step ... (Ctrl-C again: stop now, losing what is not committed)\n")
