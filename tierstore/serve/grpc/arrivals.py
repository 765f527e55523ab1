"""Places for calls whose next message is on its way.

gRPC keeps what has come of a message, up to the longest that is taken, and does not tell how much that is: so a place
counts as twice that long, as gRPC takes more. It keeps little of a call that is not read from
(``grpc.http2.lookahead_bytes``).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ..messages import ServeError, Status

_FRESH_SECONDS: Final = 0.02
"""For which nobody loses a place: a short message, which comes with its call, is there by then."""
_KEPT_SHARE: Final = 8
"""One place of so many is for connections that have none."""


class _Place:
    def __init__(self, peer: str, timer: asyncio.Timeout) -> None:
        self.peer = peer
        self.timer = timer
        self.since = time.monotonic()
        self.is_lost = False


class Arrivals:
    """Who receives. A call that finds no place takes the oldest of the connection that has most, unless its own has
    as many; else it waits. So a client that sends messages in part keeps only its own calls out. Some places are
    kept for connections without any."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: dict[str, dict[_Place, None]] = {}  # by connection; oldest first
        self._num_held = 0
        self._waiting: dict[asyncio.Future[None], str] = {}  # the connection of each, in the order of their coming

    async def receive(self, read: Callable[[], Awaitable[Any]], peer: str, seconds: float) -> Any:
        """What ``read`` gives of a connection. ServeError DEADLINE; OVERLOADED: it lost its place."""
        place: _Place | None = None
        try:
            async with asyncio.timeout(seconds) as timer:
                if self._is_full(peer):
                    await self._wait(peer)
                place = _Place(peer, timer)
                self._held.setdefault(peer, {})[place] = None
                self._num_held += 1
                return await read()
        except TimeoutError:
            if place is not None and place.is_lost:
                message = f"{self._places} requests are arriving, and the oldest gives way; try again later"
                raise ServeError(Status.OVERLOADED, message) from None
            raise ServeError(Status.DEADLINE, f"the request did not come within {seconds:g} seconds") from None
        finally:
            if place is not None:
                self._leave(place)

    def _leave(self, place: _Place) -> None:
        held = self._held.get(place.peer, {})
        if place in held:
            del held[place]
            self._num_held -= 1
            if not held:
                del self._held[place.peer]
            self._wake()

    def _is_full(self, peer: str) -> bool:
        kept = self._places // _KEPT_SHARE if peer in self._held else 0
        return self._num_held >= self._places - kept

    def _wake(self) -> None:
        for woken, peer in self._waiting.items():
            if not (woken.done() or self._is_full(peer)):
                del self._waiting[woken]
                woken.set_result(None)
                return

    async def _wait(self, peer: str) -> None:
        while self._is_full(peer):
            busiest = max(self._held.values(), key=len)
            seconds = None
            if len(busiest) > len(self._held.get(peer, ())) + 1:
                oldest = next(iter(busiest))
                seconds = oldest.since + _FRESH_SECONDS - time.monotonic()
                if seconds <= 0:
                    oldest.is_lost = True
                    oldest.timer.reschedule(0)
                    self._leave(oldest)
                    continue
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[woken] = peer
            try:
                async with asyncio.timeout(seconds):
                    await woken
            except TimeoutError:
                pass
            except BaseException:
                if not woken.cancelled():
                    self._wake()
                raise
            finally:
                self._waiting.pop(woken, None)
