"""What one client, and all of them together, may take of a REST server."""

from dataclasses import dataclass
from typing import Any

from ...settings.options import check_ranges, option
from ..encoding import MAX_ELEMENTS

__all__ = ["HttpLimits"]


def _limit(default: float, text: str) -> Any:
    return option(default, text, low=0.001 if isinstance(default, float) else 1, high=1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of a REST server. A value out of range is a ValueError that names the field."""

    body_bytes: int = _limit(64 << 20, "longest body of a request, and of a compressed one once inflated")
    json_bytes: int = _limit(
        2 << 20, "longest JSON in a request: while it is parsed nobody else is served; larger tensors go as binary data"
    )
    json_elements: int = _limit(MAX_ELEMENTS, "numbers of a response in JSON; more are sent as binary data only")
    bodies_bytes: int = _limit(1 << 30, "bodies of all requests under way; a request beyond that is answered 503")
    responses_bytes: int = _limit(
        1 << 30,
        "responses above 64 KiB that are being written, or that clients have not accepted yet; one beyond that is "
        "answered 503 instead",
    )
    header_bytes: int = _limit(16 << 10, "longest request line and header fields, and what chunks add to a body")
    connections: int = _limit(1000, "connections at a time; one more is answered 503")
    receive_seconds: float = _limit(30.0, "time for a request to arrive whole, and for a TLS handshake")
    idle_seconds: float = _limit(60.0, "time a connection may stay open without a request")
    send_seconds: float = _limit(60.0, "time a client may take to accept a response")

    def __post_init__(self) -> None:
        check_ranges(self)
