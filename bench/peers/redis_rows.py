"""Redis as an online feature store uses it, if it is installed: one key a row, read with pipelined MGET."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..serving.clients import Answer, SocketClient
from .process import HOST, PeerServer

__all__ = ["RedisClient", "RedisServer", "encoded_mget", "is_there", "rows_of"]

_PROGRAM: Final = "redis-server"
_START_SECONDS: Final = 30.0
_CHUNK_ROWS: Final = 20_000
_KEY: Final = np.dtype([("head", "S4"), ("key", "<u4"), ("end", "S2")])


def is_there() -> bool:
    return shutil.which(_PROGRAM) is not None


def _keys(ids: Any) -> Any:
    """Each id as a bulk string of four bytes, as commands hold it."""
    found = np.empty(len(ids), _KEY)
    found["head"], found["key"], found["end"] = b"$4\r\n", ids, b"\r\n"
    return found


def encoded_mget(ids: Any, commands: int) -> bytes:
    """The ids in so many MGETs of equal size, one after the other without waiting."""
    parts = np.array_split(ids, commands)
    return b"".join(b"*%d\r\n$4\r\nMGET\r\n" % (len(part) + 1) + _keys(part).tobytes() for part in parts)


def _encoded_mset(first: int, rows: Any) -> bytes:
    row_bytes = rows.shape[1] * 4
    head = b"$%d\r\n" % row_bytes
    entry = np.dtype([("key", _KEY), ("head", f"S{len(head)}"), ("row", f"V{row_bytes}"), ("end", "S2")])
    found = np.empty(len(rows), entry)
    found["key"] = _keys(np.arange(first, first + len(rows)))
    found["head"], found["end"] = head, b"\r\n"
    found["row"] = np.ascontiguousarray(rows).view(f"V{row_bytes}").reshape(-1)
    return b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(rows) + 1) + found.tobytes()


class RedisServer(PeerServer):
    """A server without persistence, on loopback, with every row under its number.

    Args:
        chunks: float32 [n, dim] each, from row 0 on.
    """

    def __init__(self, chunks: Iterable[Any], *, log: Path) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        with log.open("a") as output:
            process = subprocess.Popen(
                [_PROGRAM, "--port", str(self.port), "--bind", HOST, "--save", "", "--appendonly", "no"],
                stdout=output, stderr=output, text=True, cwd=log.parent,
            )  # fmt: skip
        super().__init__(process)
        try:
            self._fill(chunks)
        except BaseException:
            self.close()
            raise

    def _connected(self) -> socket.socket:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                return socket.create_connection((HOST, self.port), timeout=60)
            except ConnectionRefusedError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise
                time.sleep(0.02)

    def _fill(self, chunks: Iterable[Any]) -> None:
        first = 0
        with self._connected() as connection:
            for chunk in chunks:
                for start in range(0, len(chunk), _CHUNK_ROWS):
                    rows = chunk[start : start + _CHUNK_ROWS]
                    _command(connection, _encoded_mset(first, rows), b"+OK\r\n")
                    first += len(rows)
            _command(connection, b"*1\r\n$6\r\nDBSIZE\r\n", b":%d\r\n" % first)


def _reply(dim: int) -> Any:
    """One row within the reply to an MGET."""
    head = len(b"$%d\r\n" % (4 * dim))
    return np.dtype([("head", f"S{head}"), ("row", f"V{4 * dim}"), ("end", "S2")])


def rows_of(body: bytes, dim: int) -> bytes:
    """float32 [n, dim] of the replies to one or more MGETs."""
    found, position = b"", 0
    while position < len(body):
        end = body.index(b"\r\n", position)
        rows = np.frombuffer(body, _reply(dim), int(body[position + 1 : end]), end + 2)
        found += rows["row"].tobytes()
        position = end + 2 + rows.nbytes
    return found


def _command(connection: socket.socket, request: bytes, expected: bytes) -> None:
    connection.sendall(request)
    answer = b""
    while not answer.endswith(b"\r\n"):
        data = connection.recv(4096)
        if not data:
            break
        answer += data
    if answer != expected:
        raise RuntimeError(f"Redis answered {answer[:200]!r}, not {expected!r}")


class RedisClient(SocketClient):
    """Takes the replies to so many MGETs of rows of one width, all of which are there; ``rows_of`` finds the rows."""

    def __init__(self, port: int, connections: int, *, commands: int, dim: int) -> None:
        super().__init__(HOST, port, connections)
        self._commands = commands
        self._row_bytes = _reply(dim).itemsize

    def whole(self, buffer: bytearray) -> Answer | None:
        """See ``SocketClient``."""
        position = 0
        for _ in range(self._commands):
            end = buffer.find(b"\r\n", position)
            if end < 0:
                return None
            if buffer[position : position + 1] != b"*":
                return Answer(b"", bytes(buffer[position : position + 200]).decode())
            position = end + 2 + int(buffer[position + 1 : end]) * self._row_bytes
        if len(buffer) < position:
            return None
        return Answer(bytes(buffer))
