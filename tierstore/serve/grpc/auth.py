"""Who may call: whoever knows the token, where there is one; anyone may ask whether the server is healthy, but not of a
model, whose name could so be guessed."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc import aio

from ..bearer_token import Token
from ..messages import ServeError, Status
from .messages import HEALTH_SERVICE, INFERENCE_SERVICE
from .service import InferenceService
from .waiting import Call

__all__ = ["BearerAuthentication"]

_OPEN: Final = frozenset(
    {f"/{INFERENCE_SERVICE}/{name}" for name in ("ServerLive", "ServerReady")} | {f"/{HEALTH_SERVICE}/Check"}
)
_HEADER: Final = "authorization"


class BearerAuthentication(aio.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Lets a call through if its metadata has "authorization: Bearer TOKEN".

    Args:
        token: printable ASCII without spaces, else ValueError.
        service: refuses the calls that are not let through.
    """

    def __init__(self, token: str, service: InferenceService) -> None:
        self._token = Token(token)
        self._service = service

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method in _OPEN or self._is_authentic(details.invocation_metadata):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _is_authentic(self, metadata: Any) -> bool:
        return self._token.is_shown([value for key, value in metadata or () if key == _HEADER])

    async def _refuse(self, requests: Any, context: Any) -> None:
        """Answers calls of any kind, and does not wait for what they have to say."""
        del requests
        error = ServeError(Status.UNAUTHENTICATED, "this server wants metadata 'authorization: Bearer TOKEN'")
        self._service.refuse(error)
        await self._service.abort(error, Call(context), context)
