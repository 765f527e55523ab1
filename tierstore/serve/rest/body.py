"""A request's body, read whole within limits."""

import asyncio
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ...system.excerpt import excerpt
from ..messages import ServeError, Status
from .limits import HttpLimits

__all__ = ["BodyReader"]

_STEP_BYTES: Final = 256 << 10
"""Inflated at a time; others are served in between."""
_WINDOWS: Final = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class _HeldBytes:
    """The bytes that one body takes of what all bodies may."""

    def __init__(self, reader: "BodyReader") -> None:
        self._reader = reader
        self._size = 0

    def add(self, size: int) -> None:
        limits = self._reader.limits
        self.require_length(self._size + size)
        if self._reader.held_bytes + size > limits.bodies_bytes:
            raise ServeError(
                Status.OVERLOADED, f"the requests under way hold {limits.bodies_bytes} bytes; try again later"
            )
        self._size += size
        self._reader.held_bytes += size

    def require_length(self, size: int) -> None:
        """ServeError TOO_LARGE for a body that is longer than one may be."""
        limit = self._reader.limits.body_bytes
        if size > limit:
            raise ServeError(Status.TOO_LARGE, f"the body is longer than {limit} bytes")

    def release(self) -> None:
        self._reader.held_bytes -= self._size
        self._size = 0


class BodyReader:
    """Reads bodies, and knows what they take together.

    Attributes:
        held_bytes: of all bodies that are being read or held.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[_HeldBytes]:
        """Bytes that are counted until the block ends."""
        held = _HeldBytes(self)
        try:
            yield held
        finally:
            held.release()

    async def read(self, held: _HeldBytes, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The body, inflated if its content-encoding is gzip or deflate.

        Raises:
            ServeError: TOO_LARGE, without anything read where Content-Length tells; OVERLOADED; INVALID.
            ClientDisconnect: the client went away before all of it had come.
        """
        length = headers.get(b"content-length", b"0")
        if length.isdigit():
            held.require_length(int(length[:20]))
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding == "identity":
            return await _read_plain(held, receive)
        if encoding not in _WINDOWS:
            raise ServeError(Status.INVALID, f"content-encoding {excerpt(encoding)} is neither gzip nor deflate")
        return await _read_deflated(held, receive, encoding)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    """Some of the body, and whether there is more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _read_plain(held: _HeldBytes, receive: Receive) -> bytes:
    parts = []
    more = True
    while more:
        part, more = await _next_part(receive)
        held.add(len(part))
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _read_deflated(held: _HeldBytes, receive: Receive, encoding: str) -> bytes:
    stream = zlib.decompressobj(_WINDOWS[encoding])
    parts = []
    wire_bytes = 0
    more = True
    while more and not stream.unused_data:  # of which zlib would make a copy at each further part
        part, more = await _next_part(receive)
        wire_bytes += len(part)
        held.require_length(wire_bytes)  # there are streams that inflate to nothing
        while True:
            inflated = _inflate(stream, part, encoding)
            held.add(len(inflated))
            parts.append(inflated)
            part = stream.unconsumed_tail
            if len(inflated) < _STEP_BYTES and not part:
                break
            await asyncio.sleep(0)
    if not stream.eof or stream.unused_data:
        raise ServeError(Status.INVALID, f"the body is not one whole {encoding} stream")
    return b"".join(parts)


def _inflate(stream: Any, part: bytes, encoding: str) -> bytes:
    try:
        inflated: bytes = stream.decompress(part, _STEP_BYTES)
    except zlib.error as error:
        raise ServeError(Status.INVALID, f"the body is not {encoding}: {error}") from None
    return inflated
