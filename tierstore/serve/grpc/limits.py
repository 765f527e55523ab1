"""What a client may ask of the gRPC server: sizes, numbers and times, and how they are told to gRPC."""

from dataclasses import dataclass
from typing import Any, Final

from ...settings.options import check_ranges, option
from ..encoding import MAX_ELEMENTS

__all__ = ["MAX_ASKING", "MAX_COUNT", "MAX_UNREAD", "RESERVED_RPCS", "GrpcLimits"]

MAX_ASKING: Final = 128
"""Calls, also streams, whose first request has not come yet, over all connections. One more ends one of them, see
``Waiting``."""
MAX_UNREAD: Final = 320
"""Calls whose client has not accepted the response yet, likewise. Both together leave room among the calls of one
connection, which may be a proxy's."""
RESERVED_RPCS: Final = 64
"""Calls beside those and inference: they are answered at once, or are being ended."""

_MAX_PENDING_RPCS: Final = 65_536
"""Calls that gRPC has taken from connections and not yet handed to us. By default it cancels some above 1000, and all
above 3000, whoever made them: who begins and resets calls rapidly would have those of others cancelled."""

MAX_COUNT: Final = (1 << 31) - 1
"""gRPC counts in 32 bits."""


def _count(default: int, text: str, *, low: int = 1) -> Any:
    return option(default, text, low=low, high=MAX_COUNT)


def _seconds(default: float, text: str) -> Any:
    # gRPC counts milliseconds in 32 bits.
    return option(default, text, low=0.001, high=MAX_COUNT // 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits:
    """Limits of the gRPC server. A value out of range is a ValueError that names the field."""

    max_request_bytes: int = _count(16 << 20, "bytes of a request's message", low=1024)
    max_held_bytes: int = _count(
        1 << 30, "bytes of the requests that are being answered, together; one beyond that is refused", low=1024
    )
    max_response_bytes: int = _count(64 << 20, "bytes of a response's message", low=1024)
    max_response_elements: int = _count(
        MAX_ELEMENTS, "elements of a response as typed contents, or of BYTES; more of other datatypes leave raw only"
    )
    max_unsent_bytes: int = _count(
        1 << 30,
        "responses above 64 KiB, together, that are being encoded or that clients have not accepted yet; one beyond "
        "that ends a call of the connection that holds most, if it holds more than the asker's would with this one; "
        "else it is refused",
    )
    max_connections: int = _count(1000, "connections at a time; one more is closed")
    max_metadata_bytes: int = _count(16 << 10, "bytes of a call's metadata", low=1024)
    max_concurrent_rpcs: int = _count(256, "inference calls under way, over all connections; a stream counts as one")
    max_streams: int = _count(128, "ModelStreamInfer calls among them; each counts from its first request on")
    max_stream_idle_seconds: float = _seconds(
        300.0, "a stream that asks nothing more, or accepts no answer, for so long is ended"
    )
    receive_seconds: float = _seconds(
        30.0, "time a client may take to send the request of a call, or the first of a stream"
    )
    send_seconds: float = _seconds(
        60.0, "time a client may take to accept the response of a call, which is ended after that"
    )
    max_concurrent_streams: int = _count(
        512,
        "calls under way on one connection; more of them wait in the client, or fail as UNAVAILABLE if it sends them "
        "before it knows of the limit or while the server is still putting away an earlier one",
    )
    max_stream_requests: int = _count(8, "requests of one ModelStreamInfer call that are computed at a time")
    keepalive_seconds: float = _seconds(60.0, "a silent connection is pinged after so long")
    keepalive_timeout_seconds: float = _seconds(20.0, "and closed if it has not answered after so long")
    min_ping_seconds: float = _seconds(10.0, "a client that pings more often, while no data flows, is in the wrong")
    max_ping_strikes: int = _count(2, "so many times it may be, then it is disconnected; 0: any number of times", low=0)
    handshake_seconds: float = _seconds(20.0, "a connection that has not shaken hands (HTTP/2, TLS) by then is closed")
    max_idle_seconds: float = _seconds(3600.0, "a connection without calls is closed after so long")
    max_age_seconds: float = _seconds(
        86400.0, "a connection is asked to leave after so long, so that clients spread over servers started later"
    )
    max_age_grace_seconds: float = _seconds(60.0, "and its calls are ended after so long again")
    reuse_port: bool = option(False, "SO_REUSEPORT: several processes may listen on one port")

    def __post_init__(self) -> None:
        check_ranges(self)

    def channel_options(self) -> list[tuple[str, int]]:
        """As gRPC takes them: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
        milliseconds = {
            "grpc.keepalive_time_ms": self.keepalive_seconds,
            "grpc.keepalive_timeout_ms": self.keepalive_timeout_seconds,
            "grpc.http2.min_recv_ping_interval_without_data_ms": self.min_ping_seconds,
            "grpc.server_handshake_timeout_ms": self.handshake_seconds,
            "grpc.max_connection_idle_ms": self.max_idle_seconds,
            "grpc.max_connection_age_ms": self.max_age_seconds,
            "grpc.max_connection_age_grace_ms": self.max_age_grace_seconds,
        }
        counts = {
            "grpc.max_receive_message_length": self.max_request_bytes,
            # The server refuses a response that is too long itself, with a message that says so.
            "grpc.max_send_message_length": -1,
            "grpc.max_allowed_incoming_connections": self.max_connections,
            "grpc.max_metadata_size": self.max_metadata_bytes,
            "grpc.absolute_max_metadata_size": self.max_metadata_bytes,
            "grpc.max_concurrent_streams": self.max_concurrent_streams,
            "grpc.server.max_pending_requests": _MAX_PENDING_RPCS,
            "grpc.server.max_pending_requests_hard_limit": _MAX_PENDING_RPCS,
            "grpc.http2.max_ping_strikes": self.max_ping_strikes,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.so_reuseport": int(self.reuse_port),
        }
        return [*counts.items(), *((name, max(1, round(value * 1e3))) for name, value in milliseconds.items())]
