"""Updates from a trainer elsewhere: routes of the admin port by which they arrive, are applied and taken back.

- ``GET /admin/updates``: what the replica has, how much of which update, and which files of updates it keeps.
- ``PATCH /admin/updates/ID``: the body goes to where ``Content-Range: bytes FIRST-LAST/SIZE`` says, which must be where
  the upload ends; what arrives counts, also if the connection breaks.
- ``POST /admin/updates/ID/fetch``: get it from peers. ``GET /admin/updates/ID``: give it to one, as it arrives here.
- ``POST /admin/updates/ID/apply``: make it the current version, and have the server move to it; if that cannot show it,
  the replica goes back to the version before. One of a lower number needs ``?replaces=COMMIT_ID``, of what is there.
  A commit that was gone back from is refused.
- ``GET /admin/updates/lookups``: how often the hottest rows were looked up.
- ``POST /admin/updates/trial``: a commit that peers do not get from here, as its publisher still watches this server.

There is one update on its way in at a time (``incoming``). A replica that was away gets what it missed from its peers.
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
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...errors import DamagedError, DiskFullError, TierstoreError
from ...system.checks import excerpt
from ...system.files import open_plain_file, translate_os_error
from ...system.killpoints import reach
from ...system.processes import child_options
from ...system.sizes import format_size
from ...updates.fetch import Fetch, missing
from ...updates.header import Origin, UpdateHeader, origin_of
from ...updates.update_file import UpdateFile
from .incoming import Incoming, UpdateError, Upload, append, require_urls

_LOG: Final = logging.getLogger("tierstore.serve")
_MAX_UPDATE_BYTES: Final = 1 << 40
_WRITE_LIMIT_SECONDS: Final = 4 * 3600.0
IDLE_SECONDS: Final = 60.0
"""After which an upload that has not grown gives way to another: its publisher has given up by then."""
CATCH_UP_SECONDS: Final = 60.0
"""How often peers are asked for a newer version."""
_BEGIN_SECONDS: Final = 3.0
"""For which a peer's request waits for an update to begin here."""
_GROWTH_SECONDS: Final = 0.02
"""How often a file is looked at that grows: each server of a chain adds half of that."""
_BUFFER_BYTES: Final = 256 << 10
"""Passed on at once: at 100 Mb/s, each server of a chain adds 20 ms."""
_MAX_OUTPUT_CHARACTERS: Final = 2000
_ID: Final = re.compile("[0-9a-f]{16}")
_RANGE: Final = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})")
_FROM: Final = re.compile(r"bytes=([0-9]{1,16})-")
_REFUSED: Final = 422
_OF_THIS_MOMENT: Final = frozenset({"StoreLockedError", "OSError", "MemoryError"})
"""What says nothing of the update: it may be applied later."""


class Replica:
    """Takes updates for the replica that a server has open for reading.

    Args:
        extra: gives ``Store.extra`` of the version that the server shows; empty if there is none.
        refresh: has the server move to the replica's newest commit.
        token: of the admin ports of all replicas.
        peers: URLs of those of others; default: those that the last publisher named.
        lookups: gives row keys and how often each was looked up.
    """

    def __init__(
        self, directory: Path, *, extra: Callable[[], Mapping[str, Any]], refresh: Callable[[], Awaitable[object]],
        token: str | None = None, peers: Sequence[str] = (), lookups: Callable[[], Sequence[tuple[int, int]]] = tuple,
    ) -> None:  # fmt: skip
        self._directory = directory.absolute()
        self._incoming = Incoming(self._directory)
        self._extra = extra
        self._refresh = refresh
        self._token = token
        self._peers = list(peers)
        self._lookups = lookups
        self._turn = asyncio.Lock()  # of what changes the replica or receives a part
        self._is_applying = False
        self._received_at = -math.inf  # by the process before: an upload of it is idle
        self._fetch: tuple[str, asyncio.Task[None]] | None = None
        self._waits_for: Origin | None = None
        self._failures: dict[str, int] = {}  # of commits from peers; a publisher may send those given up

    def routes(self) -> list[Route]:
        return [
            Route("/admin/updates", self._list, methods=["GET"]),
            Route("/admin/updates/lookups", self._list_lookups, methods=["GET"]),
            Route("/admin/updates/trial", self._set_trial, methods=["POST"]),
            Route("/admin/updates/{id}", self._receive, methods=["PATCH"]),
            Route("/admin/updates/{id}", self._give, methods=["GET"]),
            Route("/admin/updates/{id}/fetch", self._begin_fetch, methods=["POST"]),
            Route("/admin/updates/{id}/apply", self._apply, methods=["POST"]),
        ]

    async def roll_back(self) -> int:
        """Show the version before the current one; its number at the source. UpdateError: that cannot be done now."""
        async with self._turn:
            shown, before = origin_of(self._extra()), self._incoming.declined
            left = "" if shown is None else shown.urgent or shown.commit_id
            # Before: a server that is killed meanwhile has not gone back, or stays so: see ``_settle``.
            self._incoming.set_declined([*(each for each in before if each != left), left])
            reach("rollback: declined")
            try:
                origin = await self._write("rollback", str(self._directory), left)
            except UpdateError as error:
                if error.kind:  # it was refused
                    self._incoming.set_declined(before)
                raise
            reach("rollback: written")
            self._incoming.settle(Origin(**origin))
            await self._refresh()
        _LOG.info("went back to version %d of store %s", origin["version"], origin["source"])
        return int(origin["version"])

    async def _list(self, _request: Request) -> Response:
        origin, incoming, uploads = origin_of(self._extra()), self._incoming, {}
        for upload in filter(None, (incoming.upload(), *incoming.uploads("urgent"))):
            uploads[upload.id] = {"received_bytes": upload.received_bytes, "size_bytes": upload.size_bytes}
        shown = Origin("", 0)._asdict() | {"source": None} if origin is None else origin._asdict()
        fetch = None
        if self._fetch is not None:
            update_id, task = self._fetch
            error = task.exception() if task.done() and not task.cancelled() else None
            fetch = {"id": update_id, "is_running": not task.done(), "error": "" if error is None else str(error)}
        told = {"is_applying": self._is_applying, "uploads": uploads, "fetch": fetch, "declined": incoming.declined}
        trial = None if origin is None else incoming.trial_of(origin.commit_id)
        return JSONResponse({**shown, **told, "kept": [each.name for each, _ in incoming.kept()], "trial": trial})

    async def _list_lookups(self, _request: Request) -> Response:
        return JSONResponse({"lookups": self._lookups()})

    async def _set_trial(self, request: Request) -> Response:
        self._incoming.set_trial(await _json_of(request))
        return JSONResponse({})

    # An upload

    async def _receive(self, request: Request) -> Response:
        update_id = _update_id(request)
        first, last, size = _content_range(request)
        if self._turn.locked():
            raise UpdateError(409, "another update is being sent or applied; wait for it to end")
        async with self._turn:
            upload = self._begin(update_id, size)
            if first != upload.received_bytes:
                raise UpdateError(409, f"update {update_id} goes on at byte {upload.received_bytes}, not {first}")
            self._received_at = time.monotonic()
            try:
                received = await _store(request, upload.path, first, last + 1)
            finally:
                self._received_at = time.monotonic()
        return JSONResponse({"received_bytes": received, "size_bytes": size})

    def _begin(self, update_id: str, size_bytes: int) -> Upload:
        """The upload to add to. A declared size reserves no space, but a new one must fit into what is free now."""
        if not 0 < size_bytes <= _MAX_UPDATE_BYTES:
            most = format_size(_MAX_UPDATE_BYTES)
            raise UpdateError(413, f"an update of {size_bytes} bytes; at most {most} are taken. Publish more often")
        known = self._incoming.find(update_id)
        if known is not None and (known.size_bytes != size_bytes or known.received_bytes > size_bytes):
            raise UpdateError(409, f"update {update_id} was to have {known.size_bytes} bytes, and now {size_bytes}")
        if known is not None:
            return known
        if (other := self._being_sent()) is not None:
            raise UpdateError(409, f"update {other.id} is being sent; try again {IDLE_SECONDS:.0f} s after it stopped")
        if self._fetch is not None:
            self._fetch[1].cancel()
        try:
            return self._incoming.begin(update_id, size_bytes)
        except OSError as error:
            raise translate_os_error(error, self._incoming.folder) from error

    def _being_sent(self) -> Upload | None:
        """Or applied: no other takes its place."""
        is_busy = self._is_applying or time.monotonic() - self._received_at < IDLE_SECONDS
        return self._incoming.upload() if is_busy else None

    # From peers, and for them

    async def _give(self, request: Request) -> Response:
        """An update from a byte on, as it arrives."""
        update_id = _update_id(request)
        match = _FROM.fullmatch(request.headers.get("range", "bytes=0-"))
        if match is None:
            raise UpdateError(400, "a header like Range: bytes=100- may say where to begin")
        patience = time.monotonic() + _BEGIN_SECONDS
        while (found := self._incoming.find(update_id)) is None:
            if time.monotonic() > patience:
                raise UpdateError(404, f"there is nothing of update {update_id}")
            await asyncio.sleep(_GROWTH_SECONDS)
        first = int(match[1])
        if first >= found.size_bytes:
            raise UpdateError(416, f"update {update_id} has {found.size_bytes} bytes")
        headers = {"Content-Range": f"bytes {first}-{found.size_bytes - 1}/{found.size_bytes}"}
        body = _growing(found.path, first, found.size_bytes)
        return StreamingResponse(body, 206, headers, media_type="application/octet-stream")

    async def _begin_fetch(self, request: Request) -> Response:
        update_id, body = _update_id(request), await _json_of(request)
        size, sources = body.get("size_bytes"), body.get("from")
        if not isinstance(size, int) or not isinstance(sources, list):
            raise UpdateError(
                400, 'the body must be like {"size_bytes": 1000, "from": [URL, ...], "peers": [URL, ...]}'
            )
        require_urls(sources)
        upload = self._begin(update_id, size)
        self._incoming.set_peers(body.get("peers", []))
        self._received_at = time.monotonic()
        self._start_fetch(upload, sources, is_asked=True)
        return JSONResponse({"received_bytes": upload.received_bytes, "size_bytes": size})

    def _start_fetch(self, upload: Upload, peers: Sequence[str], *, is_asked: bool) -> "asyncio.Task[None]":
        """``is_asked``: by a publisher, and so no update of another one takes its place while it grows."""
        if self._fetch is not None and self._fetch[0] == upload.id and not self._fetch[1].done():
            return self._fetch[1]
        stop = threading.Event()

        def add(data: bytes, offset: int) -> None:
            append(upload.path, data, offset)
            if is_asked:
                self._received_at = time.monotonic()

        def end(task: "asyncio.Task[None]") -> None:
            stop.set()
            if not task.cancelled() and task.exception() is not None:
                _LOG.warning("an update was not fetched: %s", task.exception())

        size = upload.size_bytes
        fetch = Fetch(upload.path, upload.id, size, peers, token=self._token, append=add, stop=stop)
        task = asyncio.create_task(asyncio.to_thread(fetch.run))
        task.add_done_callback(end)
        self._fetch = upload.id, task
        return task

    async def keep_up(self) -> None:
        """Catch up now, and from time to time, until cancelled; ends what is being fetched, too."""
        last = ""
        try:
            async with self._turn:
                self._settle()
            while True:
                try:
                    await self.catch_up()
                except Exception as error:
                    trace = None if isinstance(error, TierstoreError | OSError) else error
                    if last != (last := str(error)):
                        _LOG.warning("the replica could not catch up with its peers: %s", error, exc_info=trace)
                await asyncio.sleep(CATCH_UP_SECONDS)
        finally:
            if self._fetch is not None:
                self._fetch[1].cancel()

    def _settle(self) -> None:
        """Do what a killed process left undone of the version that is shown: keep its file, and none of others."""
        with contextlib.suppress(TierstoreError, OSError):
            if (shown := origin_of(self._extra())) is not None:
                upload = self._incoming.upload()
                if upload and upload.received_bytes == upload.size_bytes and _header_of(upload.path).shown == shown:
                    self._incoming.keep(upload, _header_of(upload.path))
                self._incoming.settle(shown)

    async def catch_up(self) -> None:
        """Show the newest version that peers show, if they keep the updates to it, unless a publisher sends one."""
        while self._being_sent() is None:
            peers, own = self._peers or self._incoming.peers, origin_of(self._extra())
            declined = {each for each, times in self._failures.items() if times > 1}.union(self._incoming.declined)
            found = await asyncio.to_thread(missing, own, peers, declined, token=self._token)
            if found is None or self._being_sent() is not None:
                return
            if found.update is None:
                if found.target != self._waits_for:
                    _LOG.warning("peers show %s and keep no update to it: waiting for the next publish", found.target)
                self._waits_for = found.target
                return
            fetch = self._start_fetch(self._begin(*found.update[:2]), found.peers, is_asked=False)
            await asyncio.wait({fetch})
            if fetch.cancelled() or fetch.exception() is not None:
                return
            async with self._turn:
                upload = self._incoming.find(found.update.id)
                if upload is None or origin_of(self._extra()) != own:
                    return
                try:
                    await self._apply_upload(upload, "")
                finally:
                    if not self._incoming.find(upload.id):  # the cause may have been of that moment, once
                        self._failures[found.update.commit_id] = self._failures.get(found.update.commit_id, 0) + 1
            if origin_of(self._extra()) == own:
                return  # it is not shown yet: the server drains

    # Applying one

    async def _apply(self, request: Request) -> Response:
        update_id, body = _update_id(request), await _json_of(request)
        self._incoming.set_peers(body.get("peers", []))
        async with self._turn:
            upload = self._incoming.find(update_id)
            if upload is None:
                raise UpdateError(409, f"there is nothing of update {update_id}; send the rest")
            if upload.received_bytes != upload.size_bytes:
                there = f"{upload.received_bytes} of {upload.size_bytes} bytes"
                raise UpdateError(409, f"there is {there} of update {update_id}; send the rest")
            with contextlib.suppress(DamagedError):  # which the process that writes finds, too
                origin = (await asyncio.to_thread(_header_of, upload.path)).origin
                if origin.commit_id in self._incoming.declined:
                    upload.path.unlink(missing_ok=True)
                    raise UpdateError(_REFUSED, f"this server went back from {origin}; commit again, and publish that")
            return JSONResponse(await self._apply_upload(upload, request.query_params.get("replaces", "")))

    async def _apply_upload(self, upload: Upload, replaces: str) -> dict[str, Any]:
        started = time.monotonic()
        self._is_applying = True
        try:
            applied = await self._write("apply", str(self._directory), str(upload.path), upload.id, replaces)
            reach("update: applied")
            await self._show(upload, applied)
            reach("update: shown")
            self._incoming.keep(upload, await asyncio.to_thread(_header_of, upload.path))
        except UpdateError as error:
            if error.http_status == _REFUSED and error.kind not in _OF_THIS_MOMENT:
                upload.path.unlink(missing_ok=True)  # sent again, it fares no better: others have its place
            if error.kind == DiskFullError.__name__:
                self._incoming.drop_kept()
            raise
        finally:
            self._is_applying = False
        _LOG.info("applied version %d: %d rows", applied["version"], applied["rows"])
        return {**applied, "seconds": time.monotonic() - started}

    async def _show(self, upload: Upload, applied: Mapping[str, Any]) -> None:
        try:
            await self._refresh()
        except Exception:
            upload.path.unlink(missing_ok=True)
            if not applied["was_there"]:
                # The next update begins at what is shown: so must the replica.
                with contextlib.suppress(UpdateError):  # of a first version there is none before
                    await self._write("rollback", str(self._directory))
            raise

    async def _write(self, *arguments: str) -> dict[str, Any]:
        """What ``tierstore.updates.child`` says: a process of its own, as this one has the replica open for reading."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tierstore.updates.child", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **child_options(TIERSTORE_PARENT=str(os.getpid())),
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
            await self._refresh()  # it may have been killed once all was written
            self._settle()
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


async def _json_of(request: Request) -> dict[str, Any]:
    body = b""
    async for part in request.stream():
        if len(body := body + part) > _BUFFER_BYTES:
            raise UpdateError(413, f"the body has more than {_BUFFER_BYTES} bytes: name fewer servers")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UpdateError(400, "the body must be a JSON object")
    return found


def _header_of(path: Path) -> UpdateHeader:
    with UpdateFile(path) as file:
        return file.header


async def _growing(path: Path, offset: int, stop: int) -> AsyncIterator[bytes]:
    """A file from ``offset`` to ``stop``, as it grows; ends early if it does not, or was begun anew."""
    with open_plain_file(path) as file:
        grew_at = time.monotonic()
        while offset < stop:
            data = await asyncio.to_thread(os.pread, file.fileno(), min(_BUFFER_BYTES, stop - offset), offset)
            if data:
                yield data
                offset, grew_at = offset + len(data), time.monotonic()
                continue
            status = os.fstat(file.fileno())
            if not status.st_nlink or status.st_size < offset or time.monotonic() - grew_at > IDLE_SECONDS:
                return
            await asyncio.sleep(_GROWTH_SECONDS)


async def _store(request: Request, path: Path, offset: int, stop: int) -> int:
    """Write a body to [offset, stop) of an upload; how far it then is. What came before the connection broke stays."""
    buffer = bytearray()
    try:
        async for part in request.stream():
            buffer += part
            if offset + len(buffer) > stop:
                raise UpdateError(400, f"the body is longer than the {stop} bytes that Content-Range names the end of")
            if len(buffer) >= _BUFFER_BYTES:
                await asyncio.to_thread(append, path, bytes(buffer), offset)
                offset += len(buffer)
                buffer.clear()
    except ClientDisconnect:
        _LOG.info("the upload %s was cut off", path.name)
    await asyncio.to_thread(append, path, bytes(buffer), offset)
    return offset + len(buffer)
