"""The thread that runs batches, which also tells whether it has anything to do."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any


class OneThread(Executor):
    """Runs jobs one after the other, in a thread of this name."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()  # so that the last is the last in line
        self._last: Future[Any] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every job is done. The only other thread that gives it jobs may then do what jobs do."""
        return self._last is None or self._last.done()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._lock:
            self._last = future = self._thread.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._thread.shutdown(wait, cancel_futures=cancel_futures)
