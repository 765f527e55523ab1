"""A REST server over the fake engine, in a thread with an event loop of its own."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httptools
import uvloop

from tests.serve.fakes import FakeEngine
from tierstore.serve.limits import Limits
from tierstore.serve.rest.app import RestApp
from tierstore.serve.rest.server import HttpServer, listen
from tierstore.serve.tls import Tls

SECONDS = 20.0
"""Bound of every wait in these tests."""


@dataclass(kw_only=True)
class RestServer:
    engine: FakeEngine
    app: RestApp
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    port: int
    refused: list[Exception] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """AssertionError if it does not come true, seen from the server's loop, within ``SECONDS``."""

        async def poll() -> None:
            async with asyncio.timeout(SECONDS - 1):
                while not condition():
                    await asyncio.sleep(0.005)

        self.call(poll())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)


@contextmanager
def serving(
    *,
    limits: Limits | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    listeners: list[socket.socket] | None = None,
    use_uvloop: bool = False,
    engine: FakeEngine | None = None,
) -> Iterator[RestServer]:
    loop = uvloop.new_event_loop() if use_uvloop else asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    engine = engine or FakeEngine()
    app = RestApp(engine, limits=limits, token=token)
    refused: list[Exception] = []
    server = HttpServer(app, limits=limits, tls=tls, on_refused=refused.append)
    running = RestServer(engine=engine, app=app, server=server, loop=loop, port=0, refused=refused)
    try:
        running.port = running.call(server.start(listeners or listen("127.0.0.1", 0)))
        yield running
    finally:
        with suppress(TimeoutError):
            running.call(server.stop(0.2))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()


@dataclass
class Answer:
    """One response as it came over the wire."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def read_answer(sock: socket.socket) -> Answer:
    """The next response of a connection on which no other follows it; OSError or AssertionError if none comes."""
    answer = Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete:
        data = sock.recv(1 << 16)
        assert data, "closed without an answer"
        parser.feed_data(data)
    answer.status = parser.get_status_code()
    return answer


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset ends it too."""
    data = b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data
