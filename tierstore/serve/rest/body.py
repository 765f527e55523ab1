"""A request's body, read within limits."""

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ...system.checks import excerpt
from ..limits import Hold
from ..messages import ServeError, Status

_STEP_BYTES: Final = 256 << 10
"""Inflated at a time; others are served in between."""
LONG_BYTES: Final = 1 << 20
"""Longer bodies would hold up the event loop: to copy 64 MiB into memory that is new takes some 0.1 s."""
_PAUSE_SECONDS: Final = 0.001
"""Once 256 KiB of a long body have come, and once more for each 8 MiB that have come before: 8 MiB take 32 ms, 64 MiB
1.2 s. All long bodies share these pauses, and most of the loop's time is left to others."""
_WINDOWS: Final = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


async def read_body(
    held: Hold, max_bytes: int, headers: Mapping[bytes, bytes], receive: Receive, turn: asyncio.Lock
) -> bytearray:
    """The body, inflated if its content-encoding is gzip or deflate; it grows in place, and ``held`` with it. Long
    ones take the turn. ServeError TOO_LARGE, OVERLOADED or INVALID; ClientDisconnect."""

    def require_length(size: int) -> None:
        if size > max_bytes:
            raise ServeError(Status.TOO_LARGE, f"the body is longer than {max_bytes} bytes")

    length = headers.get(b"content-length", b"0")
    if length.isdigit():
        require_length(int(length[:20]))
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding != "identity" and encoding not in _WINDOWS:
        raise ServeError(Status.INVALID, f"content-encoding {excerpt(encoding)} is neither gzip nor deflate")
    stream: Any = None if encoding == "identity" else zlib.decompressobj(_WINDOWS[encoding])
    body, wire_bytes, unpaused_bytes, more = bytearray(), 0, 0, True
    while more and not (stream and stream.unused_data):  # of which zlib would make a copy at each further part
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        wire_bytes += len(part)
        require_length(wire_bytes)  # there are streams that inflate to nothing
        while True:
            kept = part if stream is None else _inflate(stream, part, encoding)
            require_length(len(body) + len(kept))
            held.grow(len(kept))
            body += kept
            unpaused_bytes += len(kept)
            if len(body) > LONG_BYTES and unpaused_bytes >= _STEP_BYTES:
                unpaused_bytes = 0
                async with turn:
                    await asyncio.sleep(_PAUSE_SECONDS * (1 + (len(body) >> 23)))
            part = b"" if stream is None else stream.unconsumed_tail
            if not part and (stream is None or len(kept) < _STEP_BYTES):
                break
            await asyncio.sleep(0)
    if stream and (not stream.eof or stream.unused_data):
        raise ServeError(Status.INVALID, f"the body is not one whole {encoding} stream")
    return body


def _inflate(stream: Any, part: bytes, encoding: str) -> bytes:
    try:
        return bytes(stream.decompress(part, _STEP_BYTES))
    except zlib.error as error:
        raise ServeError(Status.INVALID, f"the body is not {encoding}: {error}") from None
