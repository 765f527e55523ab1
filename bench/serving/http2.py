"""gRPC without its library: HTTP/2 as far as unary calls of one method need it, over plain sockets.

gRPC's client for Python takes more of a core for a call than the server's share that is measured, and shares the cores
with the server. https://www.rfc-editor.org/rfc/rfc9113, https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import struct
from collections.abc import Iterator, Mapping
from typing import Final

from tierstore.serve.grpc.messages import INFERENCE_SERVICE

from .clients import Answer, Connection, Done, SocketClient

__all__ = [
    "ACK", "DEFAULTS", "END_HEADERS", "END_STREAM", "WINDOW_BYTES", "GrpcClient", "Kind", "call", "frame", "preface",
    "taken_frames",
]  # fmt: skip

ACK = END_STREAM = 1
END_HEADERS: Final = 4
WINDOW_BYTES, _FRAME_BYTES = 4, 5
"""Settings: a stream's first window, and the longest frame."""
_WINDOW_MAX: Final = (1 << 31) - 1
DEFAULTS: Final = {WINDOW_BYTES: (1 << 16) - 1, _FRAME_BYTES: 1 << 14}
_HEAD_BYTES: Final = 9
_PREFIX_BYTES: Final = 5
"""Before a message: whether it is compressed, and its length."""


class Kind:
    """Of a frame."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8


def _frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return struct.pack(">IBBI", size, kind, flags, stream)[1:]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame, whole."""
    return _frame_head(len(payload), kind, flags, stream) + payload


def taken_frames(buffer: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each whole frame at the start of a buffer, from which it is taken."""
    while len(buffer) >= _HEAD_BYTES and len(buffer) >= (end := _HEAD_BYTES + int.from_bytes(buffer[:3], "big")):
        kind, flags, stream = struct.unpack_from(">BBI", buffer, 3)
        payload = bytes(buffer[_HEAD_BYTES:end])
        del buffer[:end]
        yield kind, flags, stream, payload


def _literal(text: str) -> bytes:
    """An HPACK string; https://www.rfc-editor.org/rfc/rfc7541#section-5.2."""
    encoded = text.encode()
    assert len(encoded) < 127, f"{text!r} is too long for a length of one byte"
    return bytes([len(encoded)]) + encoded


def call(method: str, token: str = "") -> bytes:
    """The header block that begins a call of ``/SERVICE/NAME``, with a bearer token if there is one."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    headers |= {"authorization": f"Bearer {token}"} if token else {}
    return b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers.items())


def preface(settings: Mapping[int, int]) -> bytes:
    """What a client says first: its settings, and that all streams together may have 2 GiB under way."""
    told = b"".join(struct.pack(">HI", *each) for each in settings.items())
    more = struct.pack(">I", _WINDOW_MAX - DEFAULTS[WINDOW_BYTES])
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(Kind.SETTINGS, 0, 0, told) + frame(Kind.WINDOW_UPDATE, 0, 0, more)
    )


_PREFACE: Final = preface({WINDOW_BYTES: _WINDOW_MAX, _FRAME_BYTES: 1 << 20})


class _Calls(Connection):
    """One call at a time, each a stream of its own."""

    def __init__(self, owner: "GrpcClient") -> None:
        super().__init__(owner)
        self._call = owner.call
        self._settings = dict(DEFAULTS)  # the server's
        self._window = self._settings[WINDOW_BYTES]  # what the server still takes: of all streams, and of this one
        self._stream_window = 0
        self._stream = -1
        self._unsent = memoryview(b"")
        self._message = bytearray()
        self._num_taken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.write(_PREFACE)

    def send(self, request: bytes, done: Done) -> None:
        """See ``Connection``."""
        self._done = done
        self._stream += 2
        self._stream_window = self._settings[WINDOW_BYTES]
        self._message.clear()
        self._unsent = memoryview(struct.pack(">BI", 0, len(request)) + request)
        frames = [frame(Kind.HEADERS, END_HEADERS, self._stream, self._call), *self._sendable()]
        if self._num_taken:  # have the server's window of all streams full again
            frames.append(frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._num_taken)))
            self._num_taken = 0
        self._transport.write(b"".join(frames))

    def _sendable(self) -> list[bytes | memoryview]:
        """Of the request as much as the server takes now."""
        frames: list[bytes | memoryview] = []
        while self._unsent:
            size = min(len(self._unsent), self._window, self._stream_window, self._settings[_FRAME_BYTES])
            if size <= 0:
                break
            is_last = size == len(self._unsent)
            frames += [_frame_head(size, Kind.DATA, END_STREAM * is_last, self._stream), self._unsent[:size]]
            self._unsent = self._unsent[size:]
            self._window -= size
            self._stream_window -= size
        return frames

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for each in taken_frames(self._buffer):
            self._take(*each)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case Kind.DATA:
                self._message += payload
                self._num_taken += len(payload)
            case Kind.HEADERS if flags & END_STREAM:  # the trailers
                self._end(payload)
            case Kind.RST_STREAM if stream == self._stream:
                self._end(payload)
            case Kind.SETTINGS if not flags & ACK:
                before = self._settings[WINDOW_BYTES]
                self._settings |= dict(struct.iter_unpack(">HI", payload))
                self._stream_window += self._settings[WINDOW_BYTES] - before
                self._transport.write(b"".join([frame(Kind.SETTINGS, ACK, 0), *self._sendable()]))
            case Kind.PING if not flags & ACK:
                self._transport.write(frame(Kind.PING, ACK, 0, payload))
            case Kind.WINDOW_UPDATE if stream in (0, self._stream):
                size = int.from_bytes(payload, "big")
                if stream:
                    self._stream_window += size
                else:
                    self._window += size
                if frames := self._sendable():
                    self._transport.write(b"".join(frames))

    def _end(self, trailers: bytes) -> None:
        """A message comes with nothing but status OK; for another status the trailers tell why, in part as text."""
        prefix, message = self._message[:_PREFIX_BYTES], bytes(self._message[_PREFIX_BYTES:])
        if len(prefix) == _PREFIX_BYTES and len(message) == int.from_bytes(prefix[1:], "big"):
            self.answered(Answer(message))
        else:
            text = "".join(each if each.isprintable() else " " for each in trailers.decode("latin-1"))
            self.answered(Answer(b"", f"no answer: {text}"))


class GrpcClient(SocketClient):
    """Calls of ModelInfer, bytes in and bytes out."""

    def __init__(self, host: str, port: int, connections: int, token: str = "") -> None:
        super().__init__(host, port, connections)
        self.call: Final = call(f"/{INFERENCE_SERVICE}/ModelInfer", token)

    def connection(self) -> Connection:
        """See ``SocketClient``."""
        return _Calls(self)
