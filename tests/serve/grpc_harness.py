"""A gRPC server over a fake engine on a thread of its own, for clients that block."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from tests.serve.fakes import FakeEngine
from tierstore.serve.grpc.server import GrpcServer
from tierstore.serve.limits import Limits

WAIT_SECONDS = 20


class Served:
    """Attributes:
    engine: what is served; its attributes may be read from any thread.
    address: for a client.
    """

    def __init__(self, limits: Limits | None, options: dict[str, Any]) -> None:
        self.engine = FakeEngine()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc-server", daemon=True)
        self._thread.start()
        self.server: GrpcServer = self.call(self._make(limits, options))
        self.port = self.call(self.server.start())
        self.address = f"localhost:{self.port}" if "tls" in options else f"127.0.0.1:{self.port}"

    async def _make(self, limits: Limits | None, options: dict[str, Any]) -> GrpcServer:
        return GrpcServer(self.engine, limits, **options)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_SECONDS)

    def let_go(self) -> None:
        """Let the model "slow" answer."""
        self._loop.call_soon_threadsafe(self.engine.let_go.set)

    async def _stop(self) -> None:
        await self.server.stop()
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(ending, timeout=WAIT_SECONDS)

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()


@contextmanager
def serving(limits: Limits | None = None, **options: Any) -> Iterator[Served]:
    served = Served(limits, options)
    try:
        yield served
    finally:
        served.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"waited for: {what}"
        time.sleep(0.001)
