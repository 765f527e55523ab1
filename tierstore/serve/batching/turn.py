"""Whose batch runs, of several stores in one server."""

import threading

from ..base import Pause


def between(turn: threading.Lock, pause: Pause) -> Pause:
    """The pause of a batch that holds the turn; others have theirs meanwhile.

    One store's batch runs at a time: threads of several would wait for each other at every call that gives up Python's
    lock, up to 5 ms each, and a batch uses all threads by itself.
    """

    def paused() -> None:
        turn.release()
        try:
            pause()
        finally:
            turn.acquire()

    return paused
