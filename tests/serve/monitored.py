"""A source of made-up numbers, and apps behind real sockets, to test what monitors a server."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.serve.loops import WAIT_SECONDS, wait_for
from tierstore.pool.stats import Stats, TierStats
from tierstore.serve.source import State, TableInfo


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


class FakeSource:
    """Says what its attributes say."""

    def __init__(self) -> None:
        self.is_live = True
        self.is_ready = True
        self.version = 7
        self.newest_version = 9
        self.staleness_seconds = 2.5
        self.tiers = Stats(
            hbm=TierStats(),
            ddr=TierStats(
                lookups=50_000,
                unique=20_000,
                hits=15_000,
                misses=5_000,
                evictions=1_234,
                capacity_rows=8_000,
                bytes=3 << 20,
            ),
            ssd=TierStats(
                lookups=5_000,
                unique=5_000,
                hits=4_000,
                misses=1_000,
                capacity_rows=1_000_000,
                bytes=40_960,
                bytes_read=777,
            ),
        )
        self.named_tables = [TableInfo("item", 1_000_000, 64, "float32")]
        self.queued: dict[str, int] = {"dlrm": 17, "items": 0}

    def __call__(self) -> State:
        return State(
            live=self.is_live,
            ready=self.is_ready,
            version=self.version,
            newest_version=self.newest_version,
            staleness_seconds=self.staleness_seconds,
            tiers=self.tiers,
            tables=self.named_tables,
            queued_samples=self.queued,
        )


class Served:
    """An app on a port of its own, in a thread."""

    def __init__(self, app: Any, **settings: Any) -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none", loop="asyncio", **settings
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive(), "the server's start")
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Close all connections and the port."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()


@contextmanager
def serving(app: Any, **settings: Any) -> Iterator[Served]:
    served = Served(app, **settings)
    try:
        yield served
    finally:
        served.stop()
