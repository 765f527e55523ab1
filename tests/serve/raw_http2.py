"""A gRPC client over HTTP/2 alone: it can ask and not accept the answer, or begin to ask and not end."""

import socket
import struct
from collections.abc import Callable

from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PingAckReceived, StreamEnded, StreamReset

from bench.serving.http2 import begun, headers_of, send_part

__all__ = ["RawClient"]


class RawClient:
    """A connection that lets the server send some bytes of each call's answer, and never more.

    Args:
        port: of a server on this machine.
        window_bytes: of a call; all calls together may have up to 2 GiB.
        timeout_seconds: of whatever waits for the server; then it raises TimeoutError.
    """

    def __init__(self, port: int, *, window_bytes: int = 1024, timeout_seconds: float = 20.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_seconds)
        self._http2 = begun(window_bytes)
        self._received: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._flush()

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
        """A call's stream and frames; of a message longer than the server's windows the end follows as it takes it."""
        stream = self._http2.get_next_available_stream_id()
        self._http2.send_headers(stream, headers_of(method))
        if message is not None:
            data = memoryview(struct.pack(">BI", 0, len(message) if length < 0 else length) + message)
            while data := send_part(self._http2, stream, data, is_last=is_whole):
                self._flush()
                self._next()
        return stream, self._http2.data_to_send()

    def frame_to_reset(self, stream: int) -> bytes:
        self._http2.reset_stream(stream, ErrorCodes.CANCEL)
        return self._http2.data_to_send()

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def _flush(self) -> None:
        if frames := self._http2.data_to_send():
            self._socket.sendall(frames)

    def _next(self) -> list[Event]:
        """What comes next; settings and pings are answered. EOFError if the server has closed the connection."""
        received = self._socket.recv(1 << 16)
        if not received:
            raise EOFError
        events = self._http2.receive_data(received)
        for event in events:
            if isinstance(event, DataReceived):
                self._received[event.stream_id] = self._received.get(event.stream_id, b"") + event.data
            elif isinstance(event, StreamEnded | StreamReset):
                self._ended.add(event.stream_id)
        self._flush()
        return events

    def _wait(self, is_there: Callable[[list[Event]], bool]) -> None:
        while not is_there(self._next()):
            pass

    def wait_end(self, stream: int) -> bytes:
        """Wait until the server ends a call; the data that it sent of it. EOFError if it closes the connection."""
        if stream not in self._ended:
            self._wait(lambda _: stream in self._ended)
        return self._received.get(stream, b"")

    def wait_handled(self) -> None:
        """Wait until the server has read what was sent."""
        self._http2.ping(bytes(8))
        self._flush()
        self._wait(lambda events: any(isinstance(event, PingAckReceived) for event in events))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
