"""The process of ``tierstore publish``: it offers a store's versions to replicas."""

import asyncio
import signal
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ...system.processes import address, is_loopback
from ...updates.publish import Publisher
from ..limits import Limits
from ..rest.server import HttpServer, listen
from ..tls import Tls
from .app import admin_app
from .offer import offer_routes

_CONNECTIONS: Final = 200


def publishing_app(publisher: Publisher, token: str | None) -> ASGIApp:
    """The list, the files, and /metrics."""
    folder = publisher.folder

    async def show_metrics(_: Request) -> PlainTextResponse:
        found = {
            "published_version": folder.listing.target.version if folder.listing.target else 0,
            "published_trial_version": folder.listing.trial.version if folder.listing.trial else 0,
            "published_undecided_seconds": publisher.waits_seconds,
            "published_bytes_given": folder.given_bytes,
        }
        return PlainTextResponse("".join(f"tierstore_{name} {value:g}\n" for name, value in found.items()))

    return admin_app([*offer_routes(folder), Route("/metrics", show_metrics)], token=token)


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
    server = HttpServer(publishing_app(publisher, token), limits=Limits(connections=_CONNECTIONS), tls=tls)
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
