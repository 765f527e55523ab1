"""A gRPC client that speaks HTTP/2 by hand: it can ask and not accept the answer, or begin to ask and not end."""

import socket
import struct
from typing import Final, NamedTuple

__all__ = ["RawClient"]

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_END_HEADERS: Final = 4
_MAX_FRAME_BYTES: Final = 16_384
_INITIAL_WINDOW_SIZE: Final = 4
_CANCEL: Final = 8
_DEFAULT_WINDOW_BYTES: Final = 65_535


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def _literal(text: str) -> bytes:
    """An HPACK string; https://www.rfc-editor.org/rfc/rfc7541#section-5.2."""
    encoded = text.encode()
    assert len(encoded) < 127
    return bytes([len(encoded)]) + encoded


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


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
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, settings))
        self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1 - _DEFAULT_WINDOW_BYTES)))
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
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        block = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers.items())
        frames = [_frame(HEADERS, _END_HEADERS, stream, block)]
        if message is not None:
            data = struct.pack(">BI", 0, len(message) if length < 0 else length) + message
            pieces = [data[at : at + _MAX_FRAME_BYTES] for at in range(0, len(data), _MAX_FRAME_BYTES)]
            ends = [_END_STREAM if is_whole and piece is pieces[-1] else 0 for piece in pieces]
            frames += [_frame(DATA, end, stream, piece) for end, piece in zip(ends, pieces, strict=True)]
        return stream, b"".join(frames)

    @staticmethod
    def frame_to_reset(stream: int) -> bytes:
        return _frame(RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))

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
        frame = Frame(kind, flags, stream, self._read(int.from_bytes(head[:3], "big")))
        if kind in (SETTINGS, PING) and not flags & _ACK:
            self.send(_frame(kind, _ACK, 0, frame.payload if kind == PING else b""))
        if kind == DATA:
            self._received[stream] = self._received.get(stream, b"") + frame.payload
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & _END_STREAM):
            self._ended.add(stream)
        return frame

    def wait_end(self, stream: int) -> bytes:
        """Wait until the server ends a call; the data that it sent of it. EOFError if it closes the connection."""
        while stream not in self._ended:
            self._next()
        return self._received.get(stream, b"")

    def wait_handled(self) -> None:
        """Wait until the server has read what was sent."""
        self._socket.sendall(_frame(PING, 0, 0, bytes(8)))
        while (frame := self._next()).kind != PING or not frame.flags & _ACK:
            pass

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
