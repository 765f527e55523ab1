"""Who may call: whoever knows the token, where there is one; anyone may ask whether the server is healthy."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc import aio

from .grpc_messages import HEALTH_SERVICE, INFERENCE_SERVICE
from .messages import ServeError, Status

__all__ = ["BearerAuthentication"]

_OPEN: Final = frozenset(
    {f"/{INFERENCE_SERVICE}/{name}" for name in ("ModelReady", "ServerLive", "ServerReady")}
    | {f"/{HEALTH_SERVICE}/Check"}
)
_HEADER: Final = "authorization"
_SCHEME: Final = "bearer"


class BearerAuthentication(aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Lets a call through if its metadata has "authorization: Bearer TOKEN".

    Args:
        token: printable ASCII without spaces, else ValueError.
        on_refused: told of each call that is not let through.
    """

    def __init__(self, token: str, on_refused: Callable[[ServeError], None]) -> None:
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("the token must be printable ASCII without spaces, and not empty")
        self._token = token.encode("ascii")
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method in _OPEN or self._is_authentic(details.invocation_metadata):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _is_authentic(self, metadata: Any) -> bool:
        values = [value for key, value in metadata or () if key == _HEADER]
        if len(values) != 1 or not isinstance(values[0], str):
            return False
        scheme, _, token = values[0].partition(" ")
        # Takes the same time wherever the two differ.
        return scheme.lower() == _SCHEME and hmac.compare_digest(token.encode(errors="replace"), self._token)

    async def _refuse(self, requests: Any, context: Any) -> None:
        """Answers calls of any kind, and does not wait for what they have to say."""
        del requests
        error = ServeError(Status.UNAUTHENTICATED, "this server wants metadata 'authorization: Bearer TOKEN'")
        self._on_refused(error)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
