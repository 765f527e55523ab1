"""A server of a replica, as small as it can be: the routes under test, and a store that is open for reading."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse

import tierstore
from tests.updates.support import SMALL
from tierstore.serve.admin.app import admin_routes
from tierstore.serve.admin.receiving import Receiver

WAIT_SECONDS = 30.0


class Replica:
    """The store of a server, which its process has open while others write it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: Any = None
        self.refreshed = 0
        self.rollback: Any = None
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


class RequireToken:
    """The admin port's rule, so that a client without the token is seen."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if Request(scope).headers.get("authorization") != f"Bearer {self.token}":
            await JSONResponse({"error": "no token"}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@contextlib.contextmanager
def serving(
    directory: Path, *, token: str | None = None, port: int = 0, **settings: Any
) -> Iterator[tuple[str, Replica]]:
    """The URL of a server, and its replica."""
    replica = Replica(directory)
    receiver = Receiver(directory, extra=replica.extra, refresh=lambda: replica.refresh(), **settings)
    middleware = [] if token is None else [Middleware(RequireToken, token=token)]
    replica.rollback = receiver.roll_back
    app = Starlette(routes=[*receiver.routes(), *admin_routes(replica)], middleware=middleware)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    config = uvicorn.Config(
        app, ws="none", lifespan="off", loop="asyncio", log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", replica
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listener.close()
        replica.close()
    assert not thread.is_alive(), "the server did not stop"
