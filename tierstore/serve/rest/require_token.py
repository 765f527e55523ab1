"""A bearer token in front of an ASGI application."""

from collections.abc import Callable, Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from ..bearer_token import Token
from ..messages import ServeError, Status
from .replies import error_reply, send_reply

__all__ = ["HEALTH_PATHS", "RequireToken"]

HEALTH_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready"})


class RequireToken:
    """Passes on what carries ``Authorization: Bearer TOKEN``; answers 401 to the rest.

    Args:
        token: printable ASCII without spaces, else ValueError.
        open_paths: whole paths that need no token.
        on_refused: told of each request that is answered 401.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        *,
        open_paths: Collection[str] = HEALTH_PATHS,
        on_refused: Callable[[Exception], None] | None = None,
    ) -> None:
        self._app = app
        self._token = Token(token)
        self._open_paths = frozenset(open_paths)
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        error = ServeError(Status.UNAUTHENTICATED, "give the server's token: Authorization: Bearer TOKEN")
        if self._on_refused is not None:
            self._on_refused(error)
        await send_reply(send, error_reply(error.status.http, str(error), (b"www-authenticate", b"Bearer")))

    def _is_authorized(self, scope: Scope) -> bool:
        return self._token.is_shown([value for name, value in scope["headers"] if name == b"authorization"])
