"""Replicas and publishers, as small as they can be: the routes under test, and a store that is open for reading."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tierstore
from tests.serve import fronts
from tests.updates.support import SMALL, change
from tierstore.serve import admin
from tierstore.serve.offer import offer_routes
from tierstore.serve.replica import Replica
from tierstore.updates.fetch import Source
from tierstore.updates.publish import Publisher


class Shown:
    """The store of a server, which its process has open while others write it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: Any = None
        self.refreshed = 0
        self.taker: Any = None
        self.loop: Any = None
        self.url = ""
        self.show()

    def show(self) -> None:
        self.close()
        if (self.directory / "manifest.json").exists():
            self.store = tierstore.open(self.directory, mode="r", **SMALL)

    async def refresh(self) -> int:
        self.refreshed += 1
        self.show()
        return int(self.store.version)

    def step(self) -> bool:
        return bool(self.loop.call(self.taker.step()))

    def follow(self) -> int:
        """Follow the sources as far as they go; the version that is shown then, 0 for none."""
        while self.step() or self.taker._transfer:
            pass
        return self.version

    def roll_back(self) -> int:
        return int(self.loop.call(self.taker.roll_back()))

    @property
    def version(self) -> int:
        return 0 if self.taker.own is None else int(self.taker.own.version)

    @property
    def listing(self) -> Any:
        return self.taker.folder.listing

    def extra(self) -> dict[str, Any]:
        return {} if self.store is None else self.store.extra

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


@contextlib.contextmanager
def following(directory: Path, urls: Sequence[str], *, token: str | None = None, **settings: Any) -> Iterator[Shown]:
    """A replica that follows sources where it is told to, and offers what it has; ``settings`` are of ``Replica``."""
    replica = Shown(directory)
    sources = [Source(url, token) for url in urls]
    taker = replica.taker = Replica(
        directory, sources, extra=replica.extra, refresh=lambda: replica.refresh(), **settings
    )
    calls = admin.admin_routes(refresh=replica.refresh, rollback=taker.roll_back)
    try:
        with fronts.serving("http", app=admin.admin_app([*taker.routes(), *calls], token=token)) as served:
            replica.loop, replica.url = served, served.url
            served.call(taker.begin())
            try:
                yield replica
            finally:
                with contextlib.suppress(RuntimeError):  # a test ended it
                    served.call(taker.end())
    finally:
        replica.close()


@contextlib.contextmanager
def publishing(store: Path, *, token: str | None = None, folder: Path | None = None, **settings: Any) -> Iterator[Any]:
    """A publisher that looks where ``step`` is called, and offers at ``url``; ``given_bytes``: of files, so far."""
    publisher: Any = Publisher(store, folder, **settings)
    publisher.folder.open()
    publisher.given_bytes = 0
    app = admin.admin_app(offer_routes(publisher.folder), token=token)

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        is_file = scope["type"] == "http" and not scope["path"].endswith("list.json")

        async def count(message: Any) -> None:
            publisher.given_bytes += len(message.get("body", b"")) * is_file
            await send(message)

        await app(scope, receive, count)

    with fronts.serving("http", app=counting) as served:
        publisher.url = served.url
        yield publisher


@contextlib.contextmanager
def publishing_changes(store: Path) -> Iterator[Any]:
    """A publisher that offers a full copy of version 1, and the changes to version 2."""
    with publishing(store) as publisher:
        publisher._lacks_copy = lambda *_: False
        publisher.step()
        change(store, 2, keep=4)
        publisher.step()
        yield publisher
