"""Answers in which every number is handled by itself, as JSON and typed contents want, written beside the event loop.

A thread does it, in pieces: the interpreter's lock is held over a whole piece, and the loop gets it in between.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

__all__ = ["LARGE_ELEMENTS", "MAX_ELEMENTS", "PIECE_ELEMENTS", "Encoders", "Pause", "go_on", "pieces_of"]

LARGE_ELEMENTS: Final = 4096
"""An answer of more is encoded in a thread; to hand one over takes as long as to encode some hundred."""
MAX_ELEMENTS: Final = 1 << 20
"""Of an answer, by default; as many as a request may have as typed contents."""
PIECE_ELEMENTS: Final = 1 << 13
"""Encoded at a time: a third of a millisecond."""
_ENCODINGS: Final = 2
"""Threads that encode at a time; they have one interpreter's lock between them."""
_PAUSE_SECONDS: Final = 50e-6
"""Long enough for the loop to take the lock; if a thread merely let go of it, it would have it back first."""

Pause = Callable[[], None]
"""Called between pieces."""

_T = TypeVar("_T")


class _GivenUpError(Exception):
    """Nobody waits for the answer any more."""


def go_on() -> None:
    """The pause of what is encoded at once."""


def pieces_of(flat: NDArray[Any], pause: Pause) -> Iterator[NDArray[Any]]:
    """An array [n] in pieces, with a pause before each; none of an empty one."""
    for first in range(0, len(flat), PIECE_ELEMENTS):
        pause()
        yield flat[first : first + PIECE_ELEMENTS]


class Encoders:
    """Encodes small answers at once, and large ones in threads, a few at a time. For one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(_ENCODINGS)

    async def encode(self, work: Callable[[Pause], _T], num_elements: int) -> _T:
        """What ``work`` returns. Cancelled, the work ends at its next pause, and holds its thread until then.

        Args:
            work: calls its argument between pieces.
            num_elements: that are handled one by one.
        """
        if num_elements <= LARGE_ELEMENTS:
            return work(go_on)
        is_given_up = threading.Event()

        def pause() -> None:
            if is_given_up.is_set():
                raise _GivenUpError
            time.sleep(_PAUSE_SECONDS)

        await self._places.acquire()
        try:
            encoding = asyncio.get_running_loop().run_in_executor(None, work, pause)
        except BaseException:
            self._places.release()
            raise
        encoding.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.shield(encoding)
        except asyncio.CancelledError:
            is_given_up.set()
            raise
