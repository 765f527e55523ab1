"""Updates from a trainer elsewhere: routes of the admin port by which they arrive, are applied and taken back.

- ``GET /admin/updates``: what the replica has, and how much of which updates.
- ``PATCH /admin/updates/ID``: the body goes to where ``Content-Range: bytes FIRST-LAST/SIZE`` says, which must be where
  the upload ends; what arrives counts, also if the connection breaks.
- ``POST /admin/updates/ID/apply``: make it the current version, and have the server move to it; if that cannot show it,
  the replica goes back to the version before.

``Receiver.roll_back``, which makes the version before the current one, has its route among those of ``admin_routes``.

Answers are JSON; errors ``{"error": ...}``. Who may ask is the admin port's business, not that of these routes.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import DiskFullError, TierstoreError
from ...updates.origin import origin_of
from .uploads import TooLargeError, Upload, UploadError, Uploads, append, is_update_id
from .writing import BusyError, ReplicaWriter, WriteError

__all__ = ["MAX_BUSY", "MAX_UPDATE_BYTES", "WRITE_LIMIT_SECONDS", "Receiver", "http_status"]

_LOG: Final = logging.getLogger("tierstore.serve")
MAX_UPDATE_BYTES: Final = 1 << 40
MAX_BUSY: Final = 4
"""Updates that are being sent or applied; a trainer sends one."""
WRITE_LIMIT_SECONDS: Final = 4 * 3600.0
_BUFFER_BYTES: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})")
_SPOILED: Final = frozenset({"ChecksumError", "FormatError", "TruncatedError"})
"""What says that the file itself is of no use: sent again, it may be."""


class Receiver:
    """Takes updates for the replica that a server has open for reading.

    Args:
        directory: of the replica; need not exist yet.
        extra: of the version that the server shows (``Store.extra``); empty if there is none.
        refresh: have the server move to the replica's newest commit; called after each that was made here.
        max_update_bytes: the largest update that is taken.
        write_limit_seconds: after which a process that applies an update is ended.
    """

    def __init__(
        self,
        directory: Path,
        *,
        extra: Callable[[], Mapping[str, Any]],
        refresh: Callable[[], Awaitable[object]],
        max_update_bytes: int = MAX_UPDATE_BYTES,
        write_limit_seconds: float = WRITE_LIMIT_SECONDS,
    ) -> None:
        self._uploads = Uploads(directory.absolute(), max_bytes=max_update_bytes)
        self._writer = ReplicaWriter(directory.absolute(), limit_seconds=write_limit_seconds)
        self._extra = extra
        self._refresh = refresh
        self._busy: set[str] = set()

    def routes(self) -> list[Route]:
        """For the admin port's app."""
        return [
            Route("/admin/updates", _answering(self._list), methods=["GET"]),
            Route("/admin/updates/{id}", _answering(self._receive), methods=["PATCH"]),
            Route("/admin/updates/{id}/apply", _answering(self._apply), methods=["POST"]),
        ]

    async def roll_back(self) -> int:
        """Show the version before the current one; its number at the source.

        Raises:
            BusyError: an update is being applied. WriteError: there is none before, or the process failed.
        """
        origin = await self._writer.roll_back()
        await self._refresh()
        _LOG.info("went back to version %d of store %s", origin["version"], origin["source"])
        return int(origin["version"])

    async def _list(self, _request: Request) -> dict[str, Any]:
        origin = origin_of(self._extra())
        return {
            "source": None if origin is None else origin.source,
            "version": 0 if origin is None else origin.version,
            "commit_id": "" if origin is None else origin.commit_id,
            "is_applying": self._writer.is_busy,
            "uploads": {
                upload.id: {"received_bytes": upload.received_bytes, "size_bytes": upload.size_bytes}
                for upload in self._uploads.all()
            },
        }

    async def _receive(self, request: Request) -> dict[str, Any]:
        update_id = _update_id(request)
        first, last, size = _content_range(request)
        if update_id in self._busy:
            raise BusyError(f"update {update_id} is being sent or applied by another; wait for it to end")
        if len(self._busy) >= MAX_BUSY:
            raise BusyError(f"{MAX_BUSY} updates are being sent or applied; wait for one to end")
        self._busy.add(update_id)
        try:
            upload = self._uploads.begin(update_id, size, busy=self._busy)
            if first != upload.received_bytes:
                raise UploadError(f"update {update_id} goes on at byte {upload.received_bytes}, not {first}")
            received = await _store(request, upload, first, last + 1)
        finally:
            self._busy.discard(update_id)
        return {"received_bytes": received, "size_bytes": size}

    async def _apply(self, request: Request) -> dict[str, Any]:
        update_id = _update_id(request)
        if update_id in self._busy:
            raise BusyError(f"update {update_id} is being sent or applied by another; wait for it to end")
        self._busy.add(update_id)
        try:
            return await self._apply_upload(update_id)
        finally:
            self._busy.discard(update_id)

    async def _apply_upload(self, update_id: str) -> dict[str, Any]:
        upload = self._uploads.find(update_id)
        if upload is None or not upload.is_whole:
            there = "nothing" if upload is None else f"{upload.received_bytes} of {upload.size_bytes} bytes"
            raise UploadError(f"there is {there} of update {update_id}; send the rest")
        started = time.monotonic()
        try:
            applied = await self._writer.apply(upload.path, update_id)
        except WriteError as error:
            if error.kind in _SPOILED:
                self._uploads.drop(update_id)
            raise
        self._uploads.drop(update_id)
        try:
            await self._refresh()
        except Exception:
            if not applied["was_there"]:
                # The next update begins at what is shown: so must the replica.
                with contextlib.suppress(WriteError, BusyError):  # of a first version there is none before
                    await self._writer.roll_back()
            raise
        _LOG.info("applied version %d: %d rows", applied["version"], applied["rows"])
        return {**applied, "seconds": time.monotonic() - started}


def _update_id(request: Request) -> str:
    update_id: str = request.path_params["id"]
    if not is_update_id(update_id):
        raise ValueError("an update is named by the 16 hex digits of its XXH64")
    return update_id


def _content_range(request: Request) -> tuple[int, int, int]:
    """First byte, last byte and size of the whole."""
    match = _RANGE.fullmatch(request.headers.get("content-range", ""))
    if match is None:
        raise ValueError("a header like Content-Range: bytes 0-99/1000 must say where the body belongs")
    first, last, size = (int(part) for part in match.groups())
    if not first <= last < size:
        raise ValueError(f"Content-Range: bytes {first}-{last}/{size} is no range of {size} bytes")
    return first, last, size


async def _store(request: Request, upload: Upload, offset: int, stop: int) -> int:
    """Write the body as it comes; where the upload ends then.

    What came before the connection broke stays. A body that is longer than it said is an error, after which the upload
    has what it should have.
    """
    buffer = bytearray()
    try:
        async for part in request.stream():
            buffer += part
            if offset + len(buffer) > stop:
                raise ValueError(f"the body is longer than the {stop} bytes that Content-Range names the end of")
            if len(buffer) >= _BUFFER_BYTES:
                await asyncio.to_thread(append, upload, bytes(buffer), offset)
                offset += len(buffer)
                buffer.clear()
    except ClientDisconnect:
        _LOG.info("update %s was cut off", upload.id)
    await asyncio.to_thread(append, upload, bytes(buffer), offset)
    return offset + len(buffer)


def _answering(
    work: Callable[[Request], Awaitable[dict[str, Any]]],
) -> Callable[[Request], Awaitable[Response]]:
    """A handler that answers with what ``work`` gives, or with its error."""

    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await work(request))
        except (TierstoreError, ValueError) as error:
            status = http_status(error)
            if status >= 500:
                _LOG.warning("%s %s: %s", request.method, request.url.path, error)
            return JSONResponse({"error": str(error)}, status_code=status)

    return answer


def http_status(error: Exception) -> int:
    """Of the answer to a call that failed so."""
    if isinstance(error, DiskFullError) or getattr(error, "kind", "") == "DiskFullError":
        return 507
    if isinstance(error, TooLargeError):
        return 413
    if isinstance(error, (BusyError, UploadError)):
        return 409
    if isinstance(error, WriteError):
        return 422 if error.kind else 500
    return 400 if isinstance(error, ValueError) else 500
