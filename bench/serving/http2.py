"""gRPC without its library: unary calls over plain sockets, by h2.

gRPC's client for Python takes half as much again of the cores that generator and server share.
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import struct
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes, Settings

from tierstore.serve.grpc.codec import INFERENCE_SERVICE

from .clients import Answer, Connection, Done, SocketClient

_WINDOW, _WINDOW_MAX = (1 << 16) - 1, (1 << 31) - 1
_CONFIG: Final = H2Configuration(
    header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False,
    validate_inbound_headers=False, normalize_inbound_headers=False,
)  # fmt: skip
_PREFIX_BYTES: Final = 5
"""Before a message: whether it is compressed, and its length."""
Headers = list[tuple[str, str]]


def begun(window_bytes: int = _WINDOW_MAX) -> H2Connection:
    """A connection whose calls may each be sent so many bytes before they ask for more, all together 2 GiB."""
    made = H2Connection(_CONFIG)
    first = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: window_bytes}
    made.local_settings = Settings(client=True, initial_values=first)
    made.initiate_connection()
    made.increment_flow_control_window(_WINDOW_MAX - _WINDOW)
    return made


def headers_of(method: str) -> Headers:
    """What begins a call of ``/SERVICE/NAME``."""
    found = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    return [*found.items(), ("te", "trailers"), ("content-type", "application/grpc")]


def send_part(http2: H2Connection, stream: int, data: memoryview, *, is_last: bool = True) -> memoryview:
    """Send as much as the server takes now, and end the call with the last of it; returns the rest."""
    while data and (room := min(http2.local_flow_control_window(stream), http2.max_outbound_frame_size)):
        part, data = data[:room], data[room:]
        http2.send_data(stream, part.tobytes(), end_stream=is_last and not data)
    return data


class Calls(Connection):
    """One call at a time, each a stream of its own."""

    def __init__(self, owner: "GrpcClient") -> None:
        super().__init__(owner)
        self._headers = owner.headers
        self._http2 = begun()
        self._stream = 0
        self._unsent = memoryview(b"")
        self._message = bytearray()
        self._trailers: dict[str, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._flush()

    def send(self, request: bytes, done: Done) -> None:
        self._done, self._stream = done, self._http2.get_next_available_stream_id()
        self._message.clear()
        self._http2.send_headers(self._stream, self._headers)
        self._unsent = memoryview(struct.pack(">BI", 0, len(request)) + request)
        self._flush()

    def _flush(self) -> None:
        if self._unsent:
            self._unsent = send_part(self._http2, self._stream, self._unsent)
        if data := self._http2.data_to_send():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        is_ended = False
        for event in self._http2.receive_data(data):
            if isinstance(event, DataReceived):
                self._message += event.data
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, ResponseReceived | TrailersReceived):
                self._trailers = dict(event.headers)  # type: ignore[arg-type]
            elif isinstance(event, StreamEnded | StreamReset):
                is_ended |= event.stream_id == self._stream
        if is_ended:
            self._unsent = memoryview(b"")
        self._flush()
        if is_ended:
            is_ok = self._trailers.get("grpc-status") == "0"
            words = self._trailers.get("grpc-message", "the call was reset")
            self.answered(Answer(bytes(self._message[_PREFIX_BYTES:])) if is_ok else Answer(b"", words))


class GrpcClient(SocketClient):
    """Calls of ModelInfer, bytes in and bytes out."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        super().__init__(host, port, connections)
        self.headers: Final = headers_of(f"/{INFERENCE_SERVICE}/ModelInfer")

    def connection(self) -> Connection:
        return Calls(self)
