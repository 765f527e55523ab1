"""Redis as an online feature store uses it, if it is installed: one key a row, read with pipelined MGET."""

import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..child import HOST, Child
from ..serving.clients import Answer, SocketClient

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


def _bulks(dim: int) -> Any:
    """One row as Redis sends it, and takes it."""
    return np.dtype([("head", f"S{len(b'$%d' % (4 * dim)) + 2}"), ("row", f"V{4 * dim}"), ("end", "S2")])


def _encoded_mset(first: int, rows: Any) -> bytes:
    dim = rows.shape[1]
    found = np.empty(len(rows), [("key", _KEY), ("bulk", _bulks(dim))])
    found["key"] = _keys(np.arange(first, first + len(rows)))
    bulk = found["bulk"]
    bulk["head"], bulk["end"] = b"$%d\r\n" % (4 * dim), b"\r\n"
    bulk["row"] = np.ascontiguousarray(rows).view(f"V{4 * dim}").reshape(-1)
    return b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(rows) + 1) + found.tobytes()


class RedisServer(Child):
    """A server without persistence, on loopback, with every row under its number.

    Args:
        chunks: float32 [n, dim] each, from row 0 on.
    """

    needs_signal = True

    def __init__(self, chunks: Iterable[Any], *, log: Path) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        command = [_PROGRAM, "--port", self.port, "--bind", HOST, "--save", "", "--appendonly", "no", "--logfile", log]
        super().__init__(command, log=log, cwd=log.parent)
        try:
            self._fill(chunks)
        except BaseException:
            self.kill()
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
                    connection.sendall(_encoded_mset(first, rows))
                    if (answer := connection.recv(4096)) != b"+OK\r\n":
                        raise RuntimeError(f"Redis answered {answer!r}")
                    first += len(rows)


def rows_of(body: bytes, dim: int) -> bytes:
    """float32 [n, dim] of the replies to one or more MGETs."""
    found, position = b"", 0
    while position < len(body):
        end = body.index(b"\r\n", position)
        rows = np.frombuffer(body, _bulks(dim), int(body[position + 1 : end]), end + 2)
        found += rows["row"].tobytes()
        position = end + 2 + rows.nbytes
    return found


class RedisClient(SocketClient):
    """Takes the replies to so many MGETs of rows of one width, all of which are there; ``rows_of`` finds the rows."""

    def __init__(self, port: int, connections: int, *, commands: int, dim: int) -> None:
        super().__init__(HOST, port, connections)
        self._commands = commands
        self._row_bytes = _bulks(dim).itemsize

    def whole(self, buffer: bytearray) -> Answer | None:
        position = 0
        for _ in range(self._commands):
            end = buffer.find(b"\r\n", position)
            if end < 0:
                return None
            if buffer[position : position + 1] != b"*":
                return Answer(b"", bytes(buffer[position : position + 200]).decode())
            position = end + 2 + int(buffer[position + 1 : end]) * self._row_bytes
        return Answer(bytes(buffer)) if len(buffer) >= position else None
