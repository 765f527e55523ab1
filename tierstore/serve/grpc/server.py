"""The server of the Open Inference Protocol over gRPC, in the event loop that starts it."""

from typing import Any, Final

from grpc import aio

from ...system.processes import address
from ..limits import Limits
from ..repository import Repository
from ..tls import Tls
from .service import InferenceService

_OTHER_CALLS: Final = 1 << 12
"""Besides inference: those whose request has yet to come or whose answer to be accepted, and those about metadata. Each
has its time, and takes some 10 KiB, and up to ``_LOOKAHEAD_BYTES`` of its request; one more is refused."""
_LOOKAHEAD_BYTES: Final = 64 << 10
_CONNECTION_CALLS: Final = 512
"""Under way on one connection, which may be a proxy's; more of them wait in the client."""
_MAX_PENDING_CALLS: Final = 65_536
"""Calls that gRPC has taken from connections and not yet handed to us. By default it cancels some above 1000, and all
above 3000 over all clients: a client that begins and resets calls rapidly would have those of others cancelled."""
_SECONDS: Final = {
    # A silent connection is pinged after so long, and closed if it has not answered after so long.
    "grpc.keepalive_time_ms": 60.0,
    "grpc.keepalive_timeout_ms": 20.0,
    # A client that pings more often while no data flows is disconnected after two strikes.
    "grpc.http2.min_ping_interval_without_data_ms": 10.0,
    "grpc.max_connection_idle_ms": 3600.0,
    # A connection is asked to leave after so long, so that clients spread over servers started later.
    "grpc.max_connection_age_ms": 86_400.0,
    "grpc.max_connection_age_grace_ms": 60.0,
}


def _options(limits: Limits, *, reuse_port: bool) -> list[tuple[str, int]]:
    """As gRPC takes them: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    seconds = {**_SECONDS, "grpc.server_handshake_timeout_ms": limits.receive_seconds}
    counts = {
        "grpc.max_receive_message_length": limits.body_bytes,
        # The server refuses a response that is too long itself, with a message that says so.
        "grpc.max_send_message_length": -1,
        # Of a call that is not read from. Probes would have fast clients raise it.
        "grpc.http2.lookahead_bytes": _LOOKAHEAD_BYTES,
        "grpc.http2.bdp_probe": 0,
        "grpc.max_allowed_incoming_connections": limits.connections,
        "grpc.max_metadata_size": limits.header_bytes,
        "grpc.absolute_max_metadata_size": limits.header_bytes,
        "grpc.max_concurrent_streams": _CONNECTION_CALLS,
        "grpc.server.max_pending_requests": _MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": _MAX_PENDING_CALLS,
        "grpc.http2.max_ping_strikes": 2,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.so_reuseport": int(reuse_port),
    }
    return [*counts.items(), *((name, max(1, round(value * 1e3))) for name, value in seconds.items())]


class GrpcServer:
    """Serves an engine until it is stopped; once. ValueError: a token that cannot be used."""

    def __init__(
        self,
        engine: Repository,
        limits: Limits | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reuse_port: bool = False,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._service = InferenceService(engine, self._limits, token)
        self._address = address(host, port)
        self._reuse_port = reuse_port
        self._credentials = None if tls is None else tls.credentials()
        self._server: Any = None

    async def start(self) -> int:
        """Listen; returns the port. OSError if the address cannot be listened on."""
        server = aio.server(
            options=_options(self._limits, reuse_port=self._reuse_port),
            maximum_concurrent_rpcs=self._limits.calls + _OTHER_CALLS,
        )
        server.add_generic_rpc_handlers(self._service.handlers())
        try:
            if self._credentials:
                port = server.add_secure_port(self._address, self._credentials)
            else:
                port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {self._address}: {error}") from None
        await server.start()
        self._server = server
        return int(port)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more calls, give those in flight so long to end, then cancel them. May be called again."""
        if self._server is not None:
            await self._server.stop(grace_seconds)
