"""What one client, and all of them together, may take of a server; the same over REST and gRPC unless it says so."""

from dataclasses import dataclass
from typing import Any, Final

from ..settings.options import check_ranges, option
from .messages import ServeError, Status

__all__ = ["LARGE_RESPONSE_BYTES", "MAX_ELEMENTS", "Budget", "Hold", "Limits"]

MAX_ELEMENTS: Final = 1 << 20
"""Numbers of a request or an answer that are handled one by one: JSON, gRPC's typed contents, and BYTES."""
LARGE_RESPONSE_BYTES: Final = 64 << 10
"""Responses up to this are neither waited for nor counted: sockets and HTTP/2 hold as much for any connection."""
_MAX_COUNT: Final = (1 << 31) - 1
"""gRPC counts in 32 bits."""


def _count(default: int, text: str) -> Any:
    return option(default, text, low=1, high=_MAX_COUNT)


def _seconds(default: float, text: str) -> Any:
    return option(default, text, low=0.001, high=_MAX_COUNT // 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A value out of range is a ValueError that names the field."""

    body_bytes: int = _count(64 << 20, "longest request, and of a compressed one once inflated")
    bodies_bytes: int = _count(1 << 30, "requests under way, together; one beyond that is refused")
    json_bytes: int = _count(
        2 << 20, "longest JSON in a request: while it is parsed nobody else is served; larger tensors go as binary data"
    )
    elements: int = _count(MAX_ELEMENTS, "numbers of a response in JSON or typed contents; more leave as binary only")
    response_bytes: int = _count(64 << 20, "longest response over gRPC")
    responses_bytes: int = _count(
        1 << 30, "responses above 64 KiB that are encoded or not accepted yet, together; one beyond that is refused"
    )
    header_bytes: int = _count(16 << 10, "longest request line and header fields, or metadata")
    connections: int = _count(1000, "connections at a time, of each protocol; one more is refused")
    calls: int = _count(256, "inference calls under way over gRPC; a stream counts as one")
    streams: int = _count(128, "ModelStreamInfer calls among them")
    receive_seconds: float = _seconds(30.0, "time for a request to arrive whole, and for a TLS handshake")
    send_seconds: float = _seconds(60.0, "time a client may take to accept a response")
    idle_seconds: float = _seconds(60.0, "time an HTTP connection may stay open without a request")
    stream_idle_seconds: float = _seconds(300.0, "time a gRPC stream may ask nothing more")

    def __post_init__(self) -> None:
        check_ranges(self)


class Hold:
    """A part of a budget; given back once, at ``release`` or the end of a ``with``."""

    def __init__(self, budget: "Budget") -> None:
        self._budget = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """Take more. Raises ServeError OVERLOADED if the budget has no room."""
        self._budget.take(size)
        self.size += size

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._budget.held -= self.size
        self.size = 0


class Budget:
    """What all requests together may hold of something. For one event loop.

    Args:
        limit: in bytes, or a number.
        what: that there is too much of, with {} for the limit, for the error.

    Attributes:
        held: now.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.held = 0

    def take(self, size: int) -> None:
        """See ``hold``, which gives it back."""
        if self.held + size > self._limit:
            raise ServeError(Status.OVERLOADED, f"{self._what.format(self._limit)}; try again later")
        self.held += size

    def hold(self, size: int = 0) -> Hold:
        """A part of that size. Raises ServeError OVERLOADED if there is no room."""
        hold = Hold(self)
        hold.grow(size)
        return hold
