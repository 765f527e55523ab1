"""Redis as an online feature store uses it, if it is installed: one key a row, read with pipelined MGET."""

import socket
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis

from .. import redis_server
from ..child import HOST, Child
from ..serving.clients import Answer, SocketClient

_MSET_ROWS: Final = 20_000
_KEY: Final = np.dtype([("head", "S4"), ("key", "<u4"), ("end", "S2")])


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


class RedisServer(Child):
    """A server without persistence, on loopback, with every row of the chunks, float32 [n, dim], under its number."""

    needs_signal = True

    def __init__(self, chunks: Iterable[Any], *, log: Path) -> None:
        assert redis_server.COMMAND is not None, "redis-server is not installed"
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port: int = free.getsockname()[1]
        options = ["--port", self.port, "--bind", HOST, "--save", "", "--appendonly", "no", "--logfile", log]
        super().__init__([redis_server.COMMAND, *options], log=log, cwd=log.parent)
        try:
            self._fill(chunks)
        except BaseException:
            self.kill()
            raise

    def _fill(self, chunks: Iterable[Any]) -> None:
        until_it_listens = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 600)
        rows = enumerate(row.tobytes() for chunk in chunks for row in chunk)
        with redis.Redis(HOST, self.port, retry=until_it_listens) as client:
            while some := dict(islice(rows, _MSET_ROWS)):
                client.mset({number.to_bytes(4, "little"): row for number, row in some.items()})


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
