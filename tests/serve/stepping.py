"""An event loop and an executor that move only when told, so that a test chooses every interleaving."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

PASSES = 8
"""Through the loop's queue, more than any chain of callbacks needs."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """Time stands still but for ``advance``."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.complaints: list[dict[str, Any]] = []
        super().__init__()
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run what is ready, and what that makes ready."""
        for _ in range(PASSES):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.settle()


class SteppedExecutor(Executor):
    """Jobs run where ``run_next`` is called."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.is_shut_down = False
        self._is_running = False

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self._is_running

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run_next(self) -> None:
        future, job = self.jobs.pop(0)
        if future.set_running_or_notify_cancel():
            self._is_running = True
            try:
                future.set_result(job())
            finally:
                self._is_running = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_shut_down = True
        while cancel_futures and self.jobs:
            future, _ = self.jobs.pop()
            future.cancel()
            future.set_running_or_notify_cancel()
