"""Update files for replicas: GET /updates/list.json, with an ETag, and GET /updates/ID, with a range, as it arrives.

And the process of ``tierstore publish``, which offers a store's versions so."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import TierstoreError
from ..system.files import open_plain_file
from ..system.processes import address, is_loopback
from ..updates.listing import Folder, Offered
from ..updates.publish import Publisher
from .admin import admin_app
from .credentials import Tls
from .limits import Limits
from .rest.server import HttpServer, listen

_CONNECTIONS: Final = 200
_IDLE_SECONDS: Final = 60.0  # without growth; then a file ends early
_GROWTH_SECONDS: Final = 0.02
"""How often a file is looked at that grows: each server that passes it on adds half of that."""
_PART_BYTES: Final = 256 << 10
_FROM: Final = re.compile(r"bytes=([0-9]{1,16})-")


class UpdateError(TierstoreError):
    """A call that cannot be done. ``is_passing``: for a reason that says nothing of versions and files. ``faults``: of
    files, by path, "refused" for what was offered, "damaged" for what this disk made of it."""

    def __init__(
        self, http_status: int, message: str, *, is_passing: bool = False, faults: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.http_status, self.is_passing, self.faults = http_status, is_passing, faults or {}


def offer_routes(folder: Folder, lookups: Callable[[], Sequence[tuple[int, int]]] | None = None) -> list[Route]:
    """For a folder of a publisher or a replica. ``lookups``: gives row keys and how often each was looked up."""

    async def show_list(request: Request) -> Response:
        headers, text = {"ETag": folder.tag, "Cache-Control": "no-cache"}, folder.text
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(text, headers=headers, media_type="application/json")

    async def show_lookups(_: Request) -> Response:
        assert lookups is not None
        return await asyncio.to_thread(lambda: JSONResponse({"lookups": lookups()}))

    async def give(request: Request) -> Response:
        file_id, given = request.path_params["id"], request.headers.get("range", "bytes=0-")
        offered = next((each for each in folder.listing.files if each.id == file_id), None)
        if offered is None:
            raise UpdateError(404, "there is no such update; the list names those that there are")
        if (match := _FROM.fullmatch(given)) is None:
            raise UpdateError(400, "a header like Range: bytes=100- may say where to begin")
        if (first := int(match[1])) >= offered.size_bytes:
            raise UpdateError(416, f"update {file_id} has {offered.size_bytes} bytes")
        file = await asyncio.to_thread(_open, folder.path, file_id)
        headers = {
            "Content-Range": f"bytes {first}-{offered.size_bytes - 1}/{offered.size_bytes}",
            "Content-Length": str(offered.size_bytes - first),
        }
        body = _parts(file, offered, first)
        return StreamingResponse(body, 206, headers, media_type="application/octet-stream")

    routes = [Route("/updates/list.json", show_list, methods=["GET"])]
    if lookups is not None:
        routes.append(Route("/updates/lookups", show_lookups, methods=["GET"]))
    return [*routes, Route("/updates/{id}", give, methods=["GET"])]


def _open(folder: Path, file_id: str) -> BinaryIO:
    """A file that is whole, or arrives. UpdateError: it has not begun to."""
    for name in (f"{file_id}.partial", file_id, f"{file_id}.partial"):  # it may be renamed meanwhile
        with contextlib.suppress(FileNotFoundError):
            return open_plain_file(folder / name)
    raise UpdateError(404, "there is nothing of this update yet")


async def _parts(file: BinaryIO, offered: Offered, offset: int) -> AsyncIterator[bytes]:
    """A file from ``offset`` on, as it grows; ends early if it does not, or was begun anew."""

    def read() -> tuple[bytes, bool]:
        data = os.pread(file.fileno(), min(_PART_BYTES, offered.size_bytes - offset), offset)
        status = os.fstat(file.fileno())
        return data, bool(data) or (status.st_nlink > 0 and status.st_size >= offset)

    try:
        grew_at = time.monotonic()
        while offset < offered.size_bytes:
            data, is_there = await asyncio.to_thread(read)
            if data:
                yield data
                offset, grew_at = offset + len(data), time.monotonic()
            elif not is_there or time.monotonic() - grew_at > _IDLE_SECONDS:
                return
            else:
                await asyncio.sleep(_GROWTH_SECONDS)
    finally:
        asyncio.get_running_loop().run_in_executor(None, file.close)  # not awaited: the request may be cancelled


def offer(publisher: Publisher, *, host: str, port: int, token: str | None, tls: tuple[str, str]) -> None:
    """Offer versions until SIGTERM or Ctrl-C; the URL is printed. ``tls``: files of certificate and key, or "".
    Errors as of ``Folder.held``. OSError: of the port. ValueError: of TLS files, or others come in without a token."""
    if token is None and not is_loopback(host):
        raise ValueError(f"--host {host} lets other machines in: give --token-file, too")
    if bool(tls[0]) != bool(tls[1]):
        raise ValueError("TLS wants both --tls-certificate and --tls-key")
    with publisher.folder.held():
        asyncio.run(_offer(publisher, host, port, token, Tls(*map(Path, tls)) if tls[0] else None))


async def _offer(publisher: Publisher, host: str, port: int, token: str | None, tls: Tls | None) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = HttpServer(
        admin_app(offer_routes(publisher.folder), token=token), limits=Limits(connections=_CONNECTIONS), tls=tls
    )
    port = await server.start(listen(host, port))
    print(f"ready: http{'s' if tls else ''}://{address(host, port)}", flush=True)
    looking, waiting = asyncio.create_task(asyncio.to_thread(publisher.run)), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({looking, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        publisher.stop()
        waiting.cancel()
        await server.stop(1.0)
        await looking
