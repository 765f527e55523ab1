"""gRPC without its library: HTTP/2 as far as unary calls of one method need it, over plain sockets.

gRPC's client for Python takes more of a core for a call than the server's share that is measured, and shares the cores
with the server. https://www.rfc-editor.org/rfc/rfc9113, https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import struct
from typing import Final

from tierstore.serve.grpc.messages import INFERENCE_SERVICE

from .clients import Answer, Connection, Done, SocketClient

__all__ = ["GrpcClient"]

_ACK = _END_STREAM = 1
_END_HEADERS: Final = 4
_WINDOW_BYTES, _FRAME_BYTES = 4, 5
"""Settings: a stream's first window, and the longest frame."""
_DEFAULTS: Final = {_WINDOW_BYTES: (1 << 16) - 1, _FRAME_BYTES: 1 << 14}
_OURS: Final = {_WINDOW_BYTES: (1 << 31) - 1, _FRAME_BYTES: 1 << 20}
_HEAD_BYTES: Final = 9
_PREFIX_BYTES: Final = 5
"""Before a message: whether it is compressed, and its length."""


class _Kind:
    """Of a frame."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8


def _frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return struct.pack(">IBBI", size, kind, flags, stream)[1:]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _frame_head(len(payload), kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    """An HPACK string of fewer than 127 bytes."""
    return bytes([len(text)]) + text.encode()


_CALL: Final = b"".join(
    b"\x00" + _literal(name) + _literal(value)
    for name, value in {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{INFERENCE_SERVICE}/ModelInfer",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }.items()
)
_PREFACE: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_Kind.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *each) for each in _OURS.items()))
    + _frame(_Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", _OURS[_WINDOW_BYTES] - _DEFAULTS[_WINDOW_BYTES]))
)


class _Calls(Connection):
    """One call at a time, each a stream of its own."""

    def __init__(self, owner: SocketClient) -> None:
        super().__init__(owner)
        self._settings = dict(_DEFAULTS)  # the server's
        self._window = self._settings[_WINDOW_BYTES]  # what the server still takes: of all streams, and of this one
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
        self._stream_window = self._settings[_WINDOW_BYTES]
        self._message.clear()
        self._unsent = memoryview(struct.pack(">BI", 0, len(request)) + request)
        frames = [_frame(_Kind.HEADERS, _END_HEADERS, self._stream, _CALL), *self._sendable()]
        if self._num_taken:  # have the server's window of all streams full again
            frames.append(_frame(_Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._num_taken)))
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
            frames += [_frame_head(size, _Kind.DATA, _END_STREAM * is_last, self._stream), self._unsent[:size]]
            self._unsent = self._unsent[size:]
            self._window -= size
            self._stream_window -= size
        return frames

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._buffer, 3)
            payload = bytes(self._buffer[_HEAD_BYTES:end])
            del self._buffer[:end]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case _Kind.DATA:
                self._message += payload
                self._num_taken += len(payload)
            case _Kind.HEADERS if flags & _END_STREAM:  # the trailers
                self._end(payload)
            case _Kind.RST_STREAM if stream == self._stream:
                self._end(payload)
            case _Kind.SETTINGS if not flags & _ACK:
                before = self._settings[_WINDOW_BYTES]
                self._settings |= dict(struct.iter_unpack(">HI", payload))
                self._stream_window += self._settings[_WINDOW_BYTES] - before
                self._transport.write(b"".join([_frame(_Kind.SETTINGS, _ACK, 0), *self._sendable()]))
            case _Kind.PING if not flags & _ACK:
                self._transport.write(_frame(_Kind.PING, _ACK, 0, payload))
            case _Kind.WINDOW_UPDATE if stream in (0, self._stream):
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

    def connection(self) -> Connection:
        """See ``SocketClient``."""
        return _Calls(self)
