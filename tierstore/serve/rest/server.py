"""HTTP/1.1 for an ASGI application, within limits, in an event loop that runs already.

uvicorn's connections without uvicorn's server: that one takes the process's signals, exits it when a port is taken, and
waits for a client without end.

uvicorn's protocol over httptools bounds neither the size of a header, nor the time a request may take to arrive or a
response to leave, nor how many requests may be queued on a connection. This adds the four, and answers in the Open
Inference Protocol's error form what cannot be passed to an application.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import httptools
import orjson
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..credentials import Tls
from ..limits import LARGE_RESPONSE_BYTES, Limits
from ..messages import ServeError, Status

UNDER_WAY: Final = "tierstore.under_way"
"""In a request's ``state``: a set in which an application puts its task, to be cancelled if the client leaves."""
MAX_PIPELINED: Final = 16
"""Requests that may wait on a connection while one is answered."""
_OFFER: Final = (b"upgrade", b"http2-settings")
_CONTINUE: Final = b"HTTP/1.1 100 "
LINGER_SECONDS: Final = 2.0
"""For which a client that was refused is still read from: closing at once would take the answer back."""

_LOGGER: Final = logging.getLogger(__name__)
# The protocol below it warns of each malformed request: a client that sends those could fill the log.
_LOGGER.setLevel(logging.ERROR)


def error_body(message: str) -> bytes:
    """An error in the Open Inference Protocol's form."""
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


class _Responses:
    """Where a connection writes responses: the head waits for the first of the body, so that one system call sends
    both, unless the body is so long that copying it costs more. ``writelines`` copies nothing, but asyncio's, of Python
    3.12.0 to 3.12.8 and 3.13.0 to 3.13.1, never pauses its caller: https://github.com/python/cpython/issues/127655."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            for part in (head, data) if len(data) > LARGE_RESPONSE_BYTES else (head + data,):
                self._transport.write(part)
        elif self._has_begun or data.startswith(_CONTINUE):
            self._transport.write(data)
        else:
            self._head, self._has_begun = data, True

    def end(self) -> None:
        if self._head:
            self.write(b"")
        self._has_begun = False

    def close(self) -> None:
        self.end()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Parser:
    """httptools' parser, without upgrades: a server may ignore an offer of another protocol (RFC 9110, 7.8). That
    parser takes the body for the other protocol's, so a request's head is given to a second one, without the
    offer."""

    def __init__(self, protocol: "BoundedProtocol", parser: Any) -> None:
        self._protocol = protocol
        self._parser = parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def is_offered(self) -> bool:
        """Another protocol, by the request that is parsed: it will come again."""
        return bool(self._parser.should_upgrade())

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self._protocol)

    def _head(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._protocol.url, version)]
        for name, value in self._protocol.headers:
            if name == b"connection":
                value = b",".join(each for each in value.split(b",") if each.strip().lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"\r\n"])


class BoundedProtocol(HttpToolsProtocol):
    """At any time at most one timer runs besides that of a response that is not accepted. A connection waits for a
    request (``idle_seconds``), receives one (``receive_seconds``), answers, or closes (``LINGER_SECONDS`` or
    ``send_seconds``)."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        *,
        limits: Limits,
        on_refused: Callable[[ServeError], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        super().__init__(config, server_state, {UNDER_WAY: self._tasks}, asyncio.get_running_loop())
        self.logger = _LOGGER
        self.parser: Any = _Parser(self, self.parser)
        self._limits = limits
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._refusal: ServeError | None = None
        self._is_closing = False
        self._under_way: list[RequestResponseCycle] = []
        self._num_messages = 0
        self._is_receiving = self._has_headers = False
        self._header_bytes = self._body_bytes = self._framing_bytes = 0

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._responses = _Responses(transport)
        limit = self._limits.connections
        refusal = ServeError(Status.OVERLOADED, f"{limit} connections are open; try again later")
        if len(self.connections) <= limit:
            self._wait(self._limits.idle_seconds, self.close)
        elif len(self.connections) <= 2 * limit:
            self._refuse(refusal)
        else:  # to tell one takes a connection for a while, too
            self._on_refused(refusal)
            self._is_closing = True
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(0)
        self.resume_writing()
        self._give_up()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._on_lost()

    def close(self) -> None:
        """Close once what was written has left, or the client had its time to accept it."""
        self._is_closing = True
        self.transport.close()
        self._wait(self._limits.send_seconds, self.transport.abort)

    def _wait(self, seconds: float, then: Callable[[], object] | None = None) -> None:
        """Replace the timer; without ``then`` there is none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if then is None else self.loop.call_later(seconds, then)

    def _wait_for_request_or_answer(self) -> None:
        self._wait(self._limits.idle_seconds, None if self._under_way else self.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    # What arrives

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        number, body_bytes = self._num_messages, self._body_bytes
        super().data_received(data)
        if self._is_receiving and self._num_messages == number and not self._is_closing:
            # The parser keeps an unfinished header, however long. Of what chunks add, honest clients need less than
            # the data itself.
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > self._limits.header_bytes + self._body_bytes:
                self._refuse(self._headers_too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_messages += 1
        self._is_receiving, self._has_headers = True, False
        self._header_bytes = self._body_bytes = self._framing_bytes = 0
        self._wait(self._limits.receive_seconds, self._receive_expired)

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + len(b": \r\n"))
        # Those after a body stay out of sight: the application has the headers already.
        if not self._has_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":  # what follows it is no body
            self._stop_parsing(ServeError(Status.INVALID, "this is no proxy: CONNECT is not answered"))
        if self.parser.is_offered:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection"
            self._stop_parsing(ServeError(Status.OVERLOADED, message))
        super().on_headers_complete()
        self.cycle.transport = self._responses  # type: ignore[assignment]
        self._has_headers = True
        self._under_way.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.is_offered:
            return
        self._is_receiving = False
        self._wait_for_request_or_answer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._responses.end()
        super().on_response_complete()
        self._under_way = [cycle for cycle in self._under_way if not cycle.response_complete]
        if self.transport.is_closing():
            if not self._is_closing:
                self.close()
        elif not self._is_receiving:
            self._wait_for_request_or_answer()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            self._stop_parsing(self._headers_too_long())

    def _headers_too_long(self) -> ServeError:
        message = f"the request's headers are longer than {self._limits.header_bytes} bytes"
        return ServeError(Status.HEADERS_TOO_LARGE, message)

    # What is answered here

    def _receive_expired(self) -> None:
        seconds = self._limits.receive_seconds
        current = self.cycle if self._has_headers else None
        if self.flow.read_paused or any(cycle is not current for cycle in self._under_way):
            # A client that waits for an earlier answer, or is not being read from, is not to blame.
            self._wait(seconds, self._receive_expired)
        elif current is not None and current.response_started:
            self.close()
        else:
            self._refuse(ServeError(Status.RECEIVE_TIMEOUT, f"the request took longer than {seconds:g} seconds"))

    def _stop_parsing(self, refusal: ServeError) -> None:
        """Raise out of the parser's callback; ``send_400_response`` follows."""
        self._refusal = refusal
        raise refusal

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """What is called when the parser failed."""
        self._refuse(self._refusal or ServeError(Status.INVALID, "what was sent is not an HTTP/1.1 request"))

    def _refuse(self, refusal: ServeError) -> None:
        """Answer, unless amid an earlier answer, and close."""
        self._on_refused(refusal)
        self._is_closing = True
        is_amid_response = any(cycle.response_started for cycle in self._under_way)
        self._give_up()
        transport: Any = self.transport
        if not is_amid_response:
            status, body = refusal.status.http, error_body(str(refusal))
            head = b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            transport.write(head + b"content-type: application/json\r\n" + length + body)
        self.flow.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
            self._wait(LINGER_SECONDS, transport.abort)
        else:
            self.close()

    def _give_up(self) -> None:
        """Let requests in flight see the client as gone, and drop those that wait."""
        self.pipeline.clear()
        for cycle in self._under_way:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        for task in self._tasks:
            task.cancel()


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
