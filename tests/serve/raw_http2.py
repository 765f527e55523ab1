"""A gRPC client that speaks HTTP/2 by hand: it can ask and not accept the answer, or begin to ask and not end."""

import socket
import struct
from typing import Final, NamedTuple

from bench.serving.http2 import ACK, END_HEADERS, END_STREAM, WINDOW_BYTES, Kind, call, frame, preface

__all__ = ["RawClient"]

_MAX_FRAME_BYTES: Final = 16_384
_CANCEL: Final = 8


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class RawClient:
    """A connection that lets the server send some bytes of each call's answer, and never more.

    Args:
        port: of a server on this machine.
        window_bytes: of a call; all calls together may have up to 2 GiB.
        timeout_seconds: of whatever waits for the server; then it raises TimeoutError.
    """

    def __init__(self, port: int, *, window_bytes: int = 1024, timeout_seconds: float = 20.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_seconds)
        self._next_stream = 1
        self._socket.sendall(preface({WINDOW_BYTES: window_bytes}))
        self._unread = b""
        self._received: dict[int, bytes] = {}
        self._ended: set[int] = set()

    def begin(self, method: str, message: bytes | None = None, *, is_whole: bool = True, length: int = -1) -> int:
        """Open a call; returns its stream. Without a message, or if not whole, it stays half-open.

        Args:
            length: what the message says that it will have.
        """
        stream, frames = self.frames_to_begin(method, message, is_whole=is_whole, length=length)
        self._socket.sendall(frames)
        return stream

    def frames_to_begin(
        self, method: str, message: bytes | None = None, *, is_whole: bool = True, length: int = -1
    ) -> tuple[int, bytes]:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        frames = [frame(Kind.HEADERS, END_HEADERS, stream, call(method))]
        if message is not None:
            data = struct.pack(">BI", 0, len(message) if length < 0 else length) + message
            pieces = [data[at : at + _MAX_FRAME_BYTES] for at in range(0, len(data), _MAX_FRAME_BYTES)]
            ends = [END_STREAM if is_whole and piece is pieces[-1] else 0 for piece in pieces]
            frames += [frame(Kind.DATA, end, stream, piece) for end, piece in zip(ends, pieces, strict=True)]
        return stream, b"".join(frames)

    @staticmethod
    def frame_to_reset(stream: int) -> bytes:
        return frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            received = self._socket.recv(1 << 16)
            if not received:
                raise EOFError
            self._unread += received
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _next(self) -> Frame:
        """What comes next; settings and pings are answered. EOFError if the server has closed the connection."""
        head = self._read(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        found = Frame(kind, flags, stream, self._read(int.from_bytes(head[:3], "big")))
        if kind in (Kind.SETTINGS, Kind.PING) and not flags & ACK:
            self.send(frame(kind, ACK, 0, found.payload if kind == Kind.PING else b""))
        if kind == Kind.DATA:
            self._received[stream] = self._received.get(stream, b"") + found.payload
        if kind == Kind.RST_STREAM or (kind in (Kind.DATA, Kind.HEADERS) and flags & END_STREAM):
            self._ended.add(stream)
        return found

    def wait_end(self, stream: int) -> bytes:
        """Wait until the server ends a call; the data that it sent of it. EOFError if it closes the connection."""
        while stream not in self._ended:
            self._next()
        return self._received.get(stream, b"")

    def wait_handled(self) -> None:
        """Wait until the server has read what was sent."""
        self._socket.sendall(frame(Kind.PING, 0, 0, bytes(8)))
        while (found := self._next()).kind != Kind.PING or not found.flags & ACK:
            pass

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
