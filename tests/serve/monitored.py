"""A source of made-up numbers, and apps behind real sockets, to test what monitors a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.serve.loops import LoopThread
from tierstore.pool.stats import Stats, TierStats
from tierstore.serve.monitoring.metrics import State, TableInfo
from tierstore.serve.rest.server import HttpServer, listen


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


class FakeSource:
    """Says what its ``state`` is."""

    def __init__(self) -> None:
        ddr = {"lookups": 50_000, "unique": 20_000, "hits": 15_000, "misses": 5_000, "evictions": 1_234}
        ssd = {"lookups": 5_000, "unique": 5_000, "hits": 4_000, "misses": 1_000, "bytes": 40_960, "bytes_read": 777}
        self.state = State(
            live=True,
            ready=True,
            version=7,
            newest_version=9,
            staleness_seconds=2.5,
            tiers=Stats(
                hbm=TierStats(),
                ddr=TierStats(**ddr, capacity_rows=8_000, bytes=3 << 20),
                ssd=TierStats(**ssd, capacity_rows=1_000_000),
            ),
            tables=[TableInfo("item", 1_000_000, 64, "float32")],
            queued_samples={"dlrm": 17, "items": 0},
        )

    def __call__(self) -> State:
        return self.state


class Served(LoopThread):
    """An app on a port of its own, in a thread."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self.port: int = self.call(self._start(app))
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self, app: Any) -> int:
        self._server = HttpServer(app)
        return await self._server.start(listen("127.0.0.1", 0))

    def stop(self) -> None:
        """Close all connections and the port."""
        if not self.loop.is_closed():
            self.call(self._server.stop(0))
            self.end_loop()


@contextmanager
def serving(app: Any) -> Iterator[Served]:
    served = Served(app)
    try:
        yield served
    finally:
        served.stop()
