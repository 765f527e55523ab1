"""Clients that do as little as a client can: bytes that were made beforehand go out, and whole answers come back."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length:"


class Answer(NamedTuple):
    """What came back: the body, or why there is none."""

    body: bytes
    error: str = ""


Done = Callable[[Answer], None]


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, owner: "SocketClient") -> None:
        self._owner = owner
        self._buffer = bytearray()
        self._done: Done | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, request: bytes, done: Done) -> None:
        """Ask, once the request before is answered."""
        self._done = done
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        answer = self._owner.whole(self._buffer)
        if answer is not None:
            self._buffer.clear()
            self.answered(answer)

    def answered(self, answer: Answer) -> None:
        """Free for the next request, and this one done."""
        done, self._done = self._done, None
        if done is not None:
            self._owner.freed(self)
            done(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        done, self._done = self._done, None
        self._owner.lost(self)
        if done is not None:
            done(Answer(b"", f"the connection was lost: {exc}"))

    def close(self) -> None:
        self._transport.close()


class SocketClient:
    """Plain sockets to one server, for one event loop; a subclass says when an answer is whole."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        self._address = host, port
        self._num_connections = connections
        self._free, self._all = list[Connection](), list[Connection]()
        self._waiting: deque[tuple[bytes, Done]] = deque()

    def connection(self) -> Connection:
        """Another one."""
        return Connection(self)

    def whole(self, buffer: bytearray) -> Answer | None:
        """The answer at the start of the buffer, which holds nothing else; None if more is to come."""
        raise NotImplementedError

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._num_connections):
            _, connection = await loop.create_connection(self.connection, *self._address)
            self._all.append(connection)
            self._free.append(connection)

    def ask(self, request: bytes, done: Done) -> None:
        """Send, at once if a connection is free, else when one is; ``done`` is called once, in the loop."""
        if self._free:
            self._free.pop().send(request, done)
        elif self._all:
            self._waiting.append((request, done))
        else:
            done(Answer(b"", "all connections are lost"))

    def freed(self, connection: Connection) -> None:
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._free.append(connection)

    def lost(self, connection: Connection) -> None:
        self._all.remove(connection)
        if connection in self._free:
            self._free.remove(connection)
        while self._waiting and not self._all:
            self._waiting.popleft()[1](Answer(b"", "all connections are lost"))

    async def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        # A transport reports its end in the loop's next turns.
        while self._all:
            await asyncio.sleep(0)


class RestClient(SocketClient):
    """HTTP/1.1, of which it understands what the server sends: a status, headers, a body of a given length."""

    def whole(self, buffer: bytearray) -> Answer | None:
        end = buffer.find(_HEAD_END)
        if end < 0:
            return None
        head = bytes(buffer[:end]).lower()
        place = head.index(_LENGTH) + len(_LENGTH)
        length = int(head[place:].split(b"\r\n", 1)[0])
        start = end + len(_HEAD_END)
        if len(buffer) < start + length:
            return None
        body = bytes(buffer[start:])
        status = head.split(b" ", 2)[1]
        return Answer(body) if status == b"200" else Answer(b"", f"{status.decode()}: {body[:200].decode()}")
