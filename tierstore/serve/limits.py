"""What one client, and all of them together, may take of a server; the same over REST and gRPC unless it says so."""

from dataclasses import dataclass
from typing import Final

from .messages import ServeError, Status

MAX_ELEMENTS: Final = 1 << 20
"""Numbers of a request or an answer that are handled one by one: JSON, and gRPC's typed contents."""
LARGE_RESPONSE_BYTES: Final = 64 << 10
"""Responses up to this are neither waited for nor counted: sockets and HTTP/2 hold as much for any connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    body_bytes: int = 64 << 20  # longest request, and of a compressed one over gRPC once inflated
    # Requests under way, together; one beyond that is refused. And again those arriving over gRPC, each as twice the
    # longest.
    bodies_bytes: int = 1 << 30
    json_bytes: int = 2 << 20  # longest JSON in a request: while it is parsed nobody else is served
    elements: int = MAX_ELEMENTS  # numbers of a response in JSON or typed contents; more leave as binary only
    response_bytes: int = 64 << 20  # longest response over gRPC
    responses_bytes: int = 1 << 30  # responses above 64 KiB that are encoded or not accepted yet, together
    header_bytes: int = 16 << 10  # longest request line and header fields, or metadata
    connections: int = 1000  # at a time, of each protocol; one more is refused
    calls: int = 256  # inference calls under way over gRPC
    receive_seconds: float = 30.0  # time for a request to arrive whole, and for a TLS handshake
    send_seconds: float = 60.0  # time a client may take to accept a response
    idle_seconds: float = 75.0  # time an HTTP connection may stay open without a request


class Hold:
    def __init__(self, budget: "Budget") -> None:
        self._budget = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """Take more; ServeError OVERLOADED if the budget is used up."""
        budget = self._budget
        if budget.held + size > budget.limit:
            raise ServeError(Status.OVERLOADED, f"{budget.what.format(budget.limit)}; try again later")
        budget.held += size
        self.size += size

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._budget.held -= self.size
        self.size = 0


class Budget:
    """What all requests together may hold of something; ``what`` is the error's text, with {} for the limit."""

    def __init__(self, limit: int, what: str) -> None:
        self.limit, self.what, self.held = limit, what, 0

    def hold(self, size: int = 0) -> Hold:
        """ServeError OVERLOADED if the budget is used up."""
        hold = Hold(self)
        hold.grow(size)
        return hold
