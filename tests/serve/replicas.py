"""A server of a replica, as small as it can be: the routes under test, and a store that is open for reading."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tierstore
from tests.serve import monitored
from tests.updates.support import SMALL
from tierstore.serve import admin

WAIT_SECONDS = 30.0


class Shown:
    """The store of a server, which its process has open while others write it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: Any = None
        self.refreshed = 0
        self.show()

    def show(self) -> None:
        self.close()
        if (self.directory / "manifest.json").exists():
            self.store = tierstore.open(self.directory, mode="r", **SMALL)

    async def refresh(self) -> int:
        self.refreshed += 1
        self.show()
        return int(self.store.version)

    def extra(self) -> dict[str, Any]:
        return {} if self.store is None else self.store.extra

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


@contextlib.contextmanager
def serving(directory: Path, *, token: str | None = None) -> Iterator[tuple[str, Shown]]:
    """The URL of a server, and its replica."""
    replica = Shown(directory)
    taker = admin.Replica(directory, extra=replica.extra, refresh=lambda: replica.refresh())
    calls = admin.admin_routes(
        refresh=replica.refresh, rollback=taker.roll_back, drain=replica.refresh, resume=replica.refresh
    )
    try:
        with monitored.serving(admin.admin_app([*taker.routes(), *calls], token=token)) as served:
            yield served.url, replica
    finally:
        replica.close()
