"""An event that signal handlers cannot break."""

import contextlib
import queue


class Flag:
    """As ``threading.Event``, for one thread that waits: a handler that raises within any call leaves no lock taken,
    and one that calls ``set`` itself does not wait for the call that it interrupted."""

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

    def wait(self, seconds: float) -> None:
        """Until it is set, or so long."""
        with contextlib.suppress(queue.Empty):
            while not self._is_set:
                self._wakes.get(timeout=seconds)
