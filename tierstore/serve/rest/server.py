"""HTTP/1.1 for an ASGI application, within limits, in an event loop that runs already.

uvicorn's connections without uvicorn's server: that one takes the process's signals, exits it when a port is taken, and
waits for a client without end.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from ..limits import Limits
from ..messages import ServeError, Status
from ..tls import Tls
from .protocol import BoundedProtocol

_BACKLOG: Final = 1024
_NO_SUCH_FAMILY: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""What an address says that the machine's network lacks, though a name has it."""
_CLEANUP_SECONDS: Final = 1.0
"""For which requests that were cut off may still clean up before they are cancelled."""


def listen(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets that listen on all of a host's addresses, at one port: "localhost" has one of each family. With
    ``reuse_port`` other processes' sockets may listen there, too. OSError: an address is taken, or none is this
    machine's."""
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, (address, _, *scope) in dict.fromkeys(found):
                # Not create_server: "::" is IPv4's wildcard, too, where the system has it so.
                try:
                    listener = opened.enter_context(socket.socket(family, kind, protocol))
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
                    listener.bind((address, listeners[0].getsockname()[1] if listeners else port, *scope))
                except OSError as error:
                    if len(found) > 1 and error.errno in _NO_SUCH_FAMILY:
                        continue
                    raise
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                listeners.append(listener)
            if not listeners:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
        opened.pop_all()
    return listeners


class HttpServer:
    """Serves an application from ``start`` to ``stop``, without its lifespan. ``on_refused``: called for what it
    never sees. ValueError: TLS files that cannot be used."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits | None = None,
        tls: Tls | None = None,
        on_refused: Callable[[ServeError], None] = lambda _: None,
    ) -> None:
        self._limits = limits or Limits()
        self._tls = None if tls is None else tls.context
        self._on_refused = on_refused
        self._config = Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ws="none",
            # Its timer is restarted by any byte; the protocol has a stricter one.
            timeout_keep_alive=2**31,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._listeners: Sequence[socket.socket] = ()
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()

    @property
    def num_connections(self) -> int:
        return len(self._state.connections) + len(self._handshakes)

    async def start(self, listeners: Sequence[socket.socket]) -> int:
        """Accept connections of bound sockets, which ``stop`` closes; returns their port."""
        loop, self._listeners = asyncio.get_running_loop(), listeners
        for listener in listeners:
            if self._tls is None:
                self._servers.append(await loop.create_server(self._protocol, sock=listener, backlog=_BACKLOG))
            else:
                self._accepting.append(loop.create_task(self._accept(listener)))
        return int(listeners[0].getsockname()[1])

    async def _accept(self, listener: socket.socket) -> None:
        """asyncio's server would have any number of handshakes under way, and tell of a connection after its own."""
        loop, most = asyncio.get_running_loop(), 2 * self._limits.connections
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # the system is short of something
                continue
            if self.num_connections >= most:
                accepted.close()
                self._on_refused(ServeError(Status.OVERLOADED, f"{most} connections are open or shake hands"))
                continue
            shaking = loop.create_task(self._shake_hands(accepted))
            self._handshakes.add(shaking)
            shaking.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        loop, seconds = asyncio.get_running_loop(), self._limits.receive_seconds
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(self._protocol, accepted, ssl=self._tls, ssl_handshake_timeout=seconds)

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, close connections that wait, let requests in flight finish, and cut off those that do not."""
        if not self._listeners:
            return
        for server in self._servers:
            server.close()
        for task in (ending := (*self._accepting, *self._handshakes)):
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self._state.connections:
                    self._lost.clear()
                    await self._lost.wait()
        for connection in tuple(self._state.connections):
            connection.transport.abort()
        tasks = tuple(self._state.tasks)
        for task in (await asyncio.wait(tasks, timeout=_CLEANUP_SECONDS))[1] if tasks else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLEANUP_SECONDS)
        self._listeners = ()

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(
            self._config, self._state, limits=self._limits, on_refused=self._on_refused, on_lost=self._lost.set
        )
