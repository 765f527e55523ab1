"""An event that signal handlers cannot break."""

import contextlib
import queue


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
