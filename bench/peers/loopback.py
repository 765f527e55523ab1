"""The limit of every server here: requests and answers of the same sizes over loopback, and nothing looked up.

A request is two uint32, its own further bytes and those wanted; the answer is a uint32, its further bytes, and those.
"""

import asyncio
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ..serving.clients import Answer, SocketClient
from .process import HOST, PeerServer

__all__ = ["LoopbackClient", "LoopbackServer", "encoded"]

_REQUEST: Final = struct.Struct("<II")
_ANSWER: Final = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 24


def encoded(request_bytes: int, answer_bytes: int) -> bytes:
    assert answer_bytes <= _MAX_BYTES
    return _REQUEST.pack(request_bytes, answer_bytes) + bytes(request_bytes)


class LoopbackClient(SocketClient):
    """See the module's docstring."""

    def whole(self, buffer: bytearray) -> Answer | None:
        """See ``SocketClient``."""
        if len(buffer) < _ANSWER.size:
            return None
        stop = _ANSWER.size + _ANSWER.unpack_from(buffer)[0]
        return Answer(bytes(buffer[_ANSWER.size : stop])) if len(buffer) >= stop else None


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._wanted = self._left = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """One request is under way at a time, and its head comes in one piece."""
        if not self._wanted:
            self._left, self._wanted = _REQUEST.unpack_from(data)
            self._left += _REQUEST.size
        self._left -= len(data)
        if not self._left:
            self._transport.write(b"".join((_ANSWER.pack(self._wanted), _ZEROS[: self._wanted])))
            self._wanted = 0


_ZEROS: Final = memoryview(bytes(_MAX_BYTES))


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class LoopbackServer(PeerServer):
    """A process that answers, on the event loop that tierstore's server has."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-m", "bench.peers.loopback"]
        super().__init__(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root))
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def client(self, connections: int) -> LoopbackClient:
        return LoopbackClient(HOST, self.port, connections)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
