"""Whose batch runs, of several stores in one server."""

import threading

from ..base import Pause


class Turn:
    """Held while a batch runs: one store's at a time. Threads of several would wait for each other at every call that
    gives up Python's lock, up to 5 ms each, and a batch uses all threads by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def between(self, pause: Pause) -> Pause:
        """The pause of a batch that holds it; others have their turn meanwhile."""

        def paused() -> None:
            self._lock.release()
            try:
                pause()
            finally:
                self._lock.acquire()

        return paused
