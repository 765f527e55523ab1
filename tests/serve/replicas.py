"""A server of a replica, as small as it can be: the routes under test, and a store that is open for reading."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tierstore
from tests.serve import monitored
from tests.updates.support import SMALL
from tierstore.serve import admin


class Shown:
    """The store of a server, which its process has open while others write it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: Any = None
        self.refreshed = 0
        self.taker: Any = None
        self.loop: Any = None
        self.show()

    def show(self) -> None:
        self.close()
        if (self.directory / "manifest.json").exists():
            self.store = tierstore.open(self.directory, mode="r", **SMALL)

    async def refresh(self) -> int:
        self.refreshed += 1
        self.show()
        return int(self.store.version)

    def catch_up(self) -> None:
        self.loop.call(self.taker.catch_up())

    async def end(self) -> None:
        if self.taker._fetch is not None:
            self.taker._fetch[1].cancel()
            await asyncio.wait({self.taker._fetch[1]})

    def extra(self) -> dict[str, Any]:
        return {} if self.store is None else self.store.extra

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


@contextlib.contextmanager
def serving(directory: Path, *, token: str | None = None, peers: Sequence[str] = ()) -> Iterator[tuple[str, Shown]]:
    """The URL of a server, and its replica."""
    replica = Shown(directory)
    taker = replica.taker = admin.Replica(
        directory,
        extra=replica.extra,
        refresh=lambda: replica.refresh(),
        token=token,
        peers=peers,
    )
    calls = admin.admin_routes(
        refresh=replica.refresh, rollback=taker.roll_back, drain=replica.refresh, resume=replica.refresh
    )
    try:
        with monitored.serving(admin.admin_app([*taker.routes(), *calls], token=token)) as served:
            replica.loop = served
            try:
                yield served.url, replica
            finally:
                with contextlib.suppress(RuntimeError):  # a test ended it
                    served.call(replica.end())
    finally:
        replica.close()
