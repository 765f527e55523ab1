"""The server of the Open Inference Protocol over gRPC, in the event loop that starts it."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from ..base import Engine
from .auth import BearerAuthentication
from .limits import MAX_ASKING, MAX_UNREAD, RESERVED_RPCS, GrpcLimits
from .service import InferenceService
from .waiting import know_makers

__all__ = ["GrpcServer"]


def _credentials(certificate: Path, key: Path) -> Any:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"no certificate {certificate} with key {key}, both in PEM: {error}") from error
    return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])


class GrpcServer:
    """Serves an engine until it is stopped; once.

    Args:
        engine: what it serves.
        limits: what clients may ask of it.
        host: address to listen on; names and IPv6 are taken.
        port: 0 for any that is free.
        token: wanted of every call but those about health, or None.
        certificate, key: PEM files, for TLS; both or neither.

    Raises:
        ValueError: a token, a certificate or a key that cannot be used.
    """

    def __init__(
        self,
        engine: Engine,
        limits: GrpcLimits | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        if (certificate is None) != (key is None):
            raise ValueError("TLS wants both certificate and key")
        self._limits = limits or GrpcLimits()
        self._service = InferenceService(engine, self._limits)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._interceptors = [] if token is None else [BearerAuthentication(token, self._service)]
        self._credentials = _credentials(certificate, key) if certificate and key else None
        self._server: Any = None
        self._forget_makers: Callable[[], None] = lambda: None

    async def start(self) -> int:
        """Listen; returns the port. OSError if the address cannot be listened on. Until ``stop`` the loop's task
        factory is the server's."""
        server = aio.server(
            interceptors=self._interceptors,
            options=self._limits.channel_options(),
            maximum_concurrent_rpcs=self._limits.max_concurrent_rpcs + MAX_ASKING + MAX_UNREAD + RESERVED_RPCS,
        )
        server.add_generic_rpc_handlers(self._service.handlers())
        try:
            if self._credentials:
                port = server.add_secure_port(self._address, self._credentials)
            else:
                port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {self._address}: {error}") from None
        self._forget_makers = know_makers(asyncio.get_running_loop())
        await server.start()
        self._server = server
        return int(port)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more calls, give those under way so long to end, then cancel them. May be called again."""
        if self._server is not None:
            await self._server.stop(grace_seconds)
        self._forget_makers()
