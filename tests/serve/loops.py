"""An event loop that a thread runs, and waiting for what comes true."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

WAIT_SECONDS = 120.0


class LoopThread:
    """Work is given to the loop by ``call``; ``end_loop`` ends loop and thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_SECONDS)

    def end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECONDS)
        self.loop.close()


def wait_for(condition: Callable[[], Any], what: str = "") -> Any:
    """What the condition gives, once that is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        time.sleep(0.005)
    return found
