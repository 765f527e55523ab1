"""Updates from a trainer elsewhere: routes of the admin port by which they arrive, are applied and taken back.

- ``GET /admin/updates``: what the replica has, and how much of which update.
- ``PATCH /admin/updates/ID``: the body goes to where ``Content-Range: bytes FIRST-LAST/SIZE`` says, which must be where
  the upload ends; what arrives counts, also if the connection breaks.
- ``POST /admin/updates/ID/apply``: make it the current version, and have the server move to it; if that cannot show it,
  the replica goes back to the version before. One of a lower number needs ``?replaces=COMMIT_ID``, of what is there.

An update on its way in is ``incoming/ID-SIZE.partial`` of the replica's directory, named by what it will be, so that it
goes on after an interruption. There is one at a time.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...errors import DiskFullError, TierstoreError
from ...system.durable import free_bytes, make_directory, write_all
from ...system.excerpt import excerpt
from ...system.oserrors import translate_os_error
from ...system.sizes import format_size
from ...updates.header import origin_of

_LOG: Final = logging.getLogger("tierstore.serve")
_MAX_UPDATE_BYTES: Final = 1 << 40
_WRITE_LIMIT_SECONDS: Final = 4 * 3600.0
IDLE_SECONDS: Final = 60.0
"""After which an upload that has not grown gives way to another: its publisher has given up by then."""
_ROOM_BYTES: Final = 64 << 20
"""Left free on the file system, by each part that arrives."""
_BUFFER_BYTES: Final = 1 << 20
_MAX_OUTPUT_CHARACTERS: Final = 2000
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,16})\.partial")
_ID: Final = re.compile("[0-9a-f]{16}")
_RANGE: Final = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})")
_REFUSED: Final = 422
_OF_THIS_MOMENT: Final = frozenset({"StoreLockedError", "OSError", "MemoryError"})
"""What says nothing of the update: it may be applied later."""


class UpdateError(TierstoreError):
    """A call that cannot be done; ``kind``: name of the error's class in the process that writes the replica, or ""."""

    def __init__(self, http_status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.http_status = http_status
        self.kind = kind


class _Upload(NamedTuple):
    """An update as far as it has come."""

    id: str
    path: Path
    received_bytes: int
    size_bytes: int
    modified_ns: int


class Replica:
    """Takes updates for the replica that a server has open for reading.

    Args:
        extra: gives ``Store.extra`` of the version that the server shows; empty if there is none.
        refresh: has the server move to the replica's newest commit.
    """

    def __init__(
        self, directory: Path, *, extra: Callable[[], Mapping[str, Any]], refresh: Callable[[], Awaitable[object]]
    ) -> None:
        self._directory = directory.absolute()
        self._incoming = self._directory / "incoming"
        self._extra = extra
        self._refresh = refresh
        self._is_busy = self._is_applying = False
        self._received_at = -math.inf  # by the process before: an upload of it is idle

    def routes(self) -> list[Route]:
        return [
            Route("/admin/updates", self._list, methods=["GET"]),
            Route("/admin/updates/{id}", self._receive, methods=["PATCH"]),
            Route("/admin/updates/{id}/apply", self._apply, methods=["POST"]),
        ]

    async def roll_back(self) -> int:
        """Show the version before the current one; its number at the source. UpdateError: that cannot be done now."""
        with self._busy():
            origin = await self._write("rollback", str(self._directory))
            await self._refresh()
        _LOG.info("went back to version %d of store %s", origin["version"], origin["source"])
        return int(origin["version"])

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """One call at a time."""
        if self._is_busy:
            raise UpdateError(409, "another update is being sent or applied; wait for it to end")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    async def _list(self, _request: Request) -> Response:
        origin, upload, uploads = origin_of(self._extra()), self._upload(), {}
        if upload is not None:
            uploads[upload.id] = {"received_bytes": upload.received_bytes, "size_bytes": upload.size_bytes}
        shown = {"source": None, "version": 0, "commit_id": ""} if origin is None else origin._asdict()
        return JSONResponse({**shown, "is_applying": self._is_applying, "uploads": uploads})

    # An upload

    async def _receive(self, request: Request) -> Response:
        update_id = _update_id(request)
        first, last, size = _content_range(request)
        with self._busy():
            upload = self._begin(update_id, size)
            if first != upload.received_bytes:
                raise UpdateError(409, f"update {update_id} goes on at byte {upload.received_bytes}, not {first}")
            try:
                received = await _store(request, upload.path, first, last + 1)
            finally:
                self._received_at = time.monotonic()
        return JSONResponse({"received_bytes": received, "size_bytes": size})

    def _upload(self) -> _Upload | None:
        """The one that there is; the last that grew, if somebody put more there."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._incoming.iterdir():
                match = _NAME.fullmatch(path.name)
                if match is not None and path.is_file() and not path.is_symlink():
                    status = path.stat()
                    found.append(_Upload(match[1], path, status.st_size, int(match[2]), status.st_mtime_ns))
        return max(found, key=lambda each: each.modified_ns, default=None)

    def _begin(self, update_id: str, size_bytes: int) -> _Upload:
        """The upload to add to. A declared size reserves no space, but a new one must fit into what is free now."""
        if not 0 < size_bytes <= _MAX_UPDATE_BYTES:
            most = format_size(_MAX_UPDATE_BYTES)
            raise UpdateError(413, f"an update of {size_bytes} bytes; at most {most} are taken. Publish more often")
        known = self._upload()
        if known is not None and known.id == update_id:
            if known.size_bytes == size_bytes and known.received_bytes <= size_bytes:
                return known
            raise UpdateError(409, f"update {update_id} was to have {known.size_bytes} bytes, and now {size_bytes}")
        if known is not None and time.monotonic() - self._received_at < IDLE_SECONDS:
            raise UpdateError(409, f"update {known.id} is being sent; try again {IDLE_SECONDS:.0f} s after it stopped")
        try:
            make_directory(self._incoming)
            for path in self._incoming.glob("*.partial"):
                path.unlink()
            _require_room(self._incoming, size_bytes)
            path = self._incoming / f"{update_id}-{size_bytes}.partial"
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise translate_os_error(error, self._incoming) from error
        return _Upload(update_id, path, 0, size_bytes, 0)

    # Applying one

    async def _apply(self, request: Request) -> Response:
        update_id = _update_id(request)
        with self._busy():
            upload = self._upload()
            if upload is None or upload.id != update_id:
                raise UpdateError(409, f"there is nothing of update {update_id}; send the rest")
            if upload.received_bytes != upload.size_bytes:
                there = f"{upload.received_bytes} of {upload.size_bytes} bytes"
                raise UpdateError(409, f"there is {there} of update {update_id}; send the rest")
            self._is_applying = True
            try:
                return JSONResponse(await self._apply_upload(upload, request.query_params.get("replaces", "")))
            finally:
                self._is_applying = False

    async def _apply_upload(self, upload: _Upload, replaces: str) -> dict[str, Any]:
        started = time.monotonic()
        try:
            applied = await self._write("apply", str(self._directory), str(upload.path), upload.id, replaces)
        except UpdateError as error:
            if error.http_status == _REFUSED and error.kind not in _OF_THIS_MOMENT:
                upload.path.unlink(missing_ok=True)  # sent again, it fares no better: others have its place
            raise
        upload.path.unlink(missing_ok=True)
        try:
            await self._refresh()
        except Exception:
            if not applied["was_there"]:
                # The next update begins at what is shown: so must the replica.
                with contextlib.suppress(UpdateError):  # of a first version there is none before
                    await self._write("rollback", str(self._directory))
            raise
        _LOG.info("applied version %d: %d rows", applied["version"], applied["rows"])
        return {**applied, "seconds": time.monotonic() - started}

    async def _write(self, *arguments: str) -> dict[str, Any]:
        """What ``tierstore.updates.child`` says: a process of its own, as this one has the replica open for reading."""
        # The package that runs there is the one that was imported here, however it was found.
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        # -P: what lies in the server's working directory is no module of ours.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierstore.updates.child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            out, err = await asyncio.to_thread(process.communicate, timeout=_WRITE_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()  # closes the pipes, which it left open for another try
            raise UpdateError(500, f"the process that writes took over {_WRITE_LIMIT_SECONDS:.0f} s") from None
        finally:
            process.kill()  # if it took too long, or nobody waits any more: the server stops
            process.wait()
        try:
            outcome: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        except (ValueError, IndexError):
            said = excerpt(err.decode(errors="replace")[-_MAX_OUTPUT_CHARACTERS:], _MAX_OUTPUT_CHARACTERS)
            raise UpdateError(500, f"the process that writes ended with {process.returncode}: {said}") from None
        if "error" in outcome:
            status = 507 if outcome["kind"] == DiskFullError.__name__ else _REFUSED
            raise UpdateError(status, str(outcome["error"]), str(outcome["kind"]))
        return outcome


def _update_id(request: Request) -> str:
    update_id: str = request.path_params["id"]
    if not _ID.fullmatch(update_id):
        raise UpdateError(400, "an update is named by the 16 hex digits of its XXH64")
    return update_id


def _content_range(request: Request) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(request.headers.get("content-range", ""))
    if match is None:
        raise UpdateError(400, "a header like Content-Range: bytes 0-99/1000 must say where the body belongs")
    first, last, size = (int(part) for part in match.groups())
    if not first <= last < size:
        raise UpdateError(400, f"Content-Range: {match[0]} is no range of {size} bytes")
    return first, last, size


def _require_room(folder: Path, size_bytes: int) -> None:
    free = free_bytes(folder)
    if free < size_bytes + _ROOM_BYTES:
        raise DiskFullError(
            f"{folder}: {format_size(size_bytes)} more, and {format_size(free)} free, of which "
            f"{format_size(_ROOM_BYTES)} stay so. Free some space, and publish again, which goes on where this stopped"
        )


async def _store(request: Request, path: Path, offset: int, stop: int) -> int:
    """Write a body to [offset, stop) of an upload; how far it then is. What came before the connection broke stays."""
    buffer = bytearray()
    try:
        async for part in request.stream():
            buffer += part
            if offset + len(buffer) > stop:
                raise UpdateError(400, f"the body is longer than the {stop} bytes that Content-Range names the end of")
            if len(buffer) >= _BUFFER_BYTES:
                await asyncio.to_thread(_append, path, bytes(buffer), offset)
                offset += len(buffer)
                buffer.clear()
    except ClientDisconnect:
        _LOG.info("the upload %s was cut off", path.name)
    await asyncio.to_thread(_append, path, bytes(buffer), offset)
    return offset + len(buffer)


def _append(path: Path, data: bytes, offset: int) -> None:
    _require_room(path.parent, len(data))
    try:
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "wb", buffering=0) as file:
            write_all(file.fileno(), data, offset)
    except OSError as error:
        raise translate_os_error(error, path) from error
