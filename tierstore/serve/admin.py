"""The admin port: what an operator may do, and who is one."""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import DiskFullError, TierstoreError
from ..system.processes import is_loopback
from .credentials import Token
from .messages import ServeError
from .metrics import CONTENT_TYPE, Metrics

ADMIN_HEADER: Final = "x-tierstore-admin"
"""With any value it marks a POST as meant: a web page elsewhere cannot send it without asking first."""

_LOG: Final = logging.getLogger("tierstore.serve")
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(?::\d+)?")  # and a port
_FORWARDED: Final = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_METRICS_HEADERS: Final = {
    "Content-Type": CONTENT_TYPE,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Call = Callable[[], Awaitable[object]]


def metrics_route(metrics: Metrics) -> Route:
    """GET /metrics, made in a thread, as that takes milliseconds."""

    async def show(_: Request) -> Response:
        return Response(await run_in_threadpool(metrics.expose), headers=_METRICS_HEADERS)

    return Route("/metrics", show, methods=["GET"])


def read_only_route() -> Route:
    """Instead of ``admin_routes``: who may change anything has a token, as not every proxy says that it is one."""

    async def refuse(_: Request) -> Response:
        return _error(403, "nothing is changed without an admin token; start the server with --admin-token-file")

    return Route("/admin/{call:path}", refuse, methods=["POST"])


def admin_routes(*, refresh: Call, rollback: Call) -> list[Route]:
    """POST /admin/refresh and /admin/rollback, answered {"version": ...}. A call raises ServeError or another
    TierstoreError where it cannot be done."""

    def route(name: str, call: Call) -> Route:
        async def answer(_: Request) -> Response:
            return JSONResponse({"version": await call()})

        return Route(f"/admin/{name}", answer, methods=["POST"])

    return [route("refresh", refresh), route("rollback", rollback)]


def admin_app(routes: Sequence[BaseRoute], *, token: str | None = None) -> Starlette:
    """The app of the admin port. Errors are {"error": message}. Without a token, which a client shows as a bearer's,
    only this machine is answered, and only where it asks for itself by a name of its own."""
    app = Starlette(
        routes=list(routes),
        middleware=[Middleware(_Access, token=None if token is None else Token(token))],
        exception_handlers=dict.fromkeys((HTTPException, TierstoreError, Exception), _answer_error),
    )
    # Else a path with a "/" too many is answered with whatever name the request gave this machine.
    app.router.redirect_slashes = False
    return app


class _Access:
    def __init__(self, app: ASGIApp, token: Token | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            why = _why_not_local(scope, headers)
            if why is not None:
                return _error(403, why)
        elif not self._token.is_shown(headers.getlist("authorization")):
            refused = _error(401, "the admin token is needed, as a bearer token")
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_meant = ADMIN_HEADER in headers or content_type == "application/json"
        if scope["method"] == "POST" and not is_meant:
            return _error(403, f"a POST needs the header {ADMIN_HEADER} or the content type application/json")
        return None


def _why_not_local(scope: Scope, headers: Headers) -> str | None:
    """Why a request is not this machine's own, or None. The Host header guards against DNS rebinding."""
    way_out = "; set an admin token to serve others"
    client = scope.get("client")
    if client is None or not is_loopback(client[0], may_be_name=False):
        return "only this machine is served" + way_out
    if any(name in headers for name in _FORWARDED):
        return "a request that a proxy forwards is not served" + way_out
    hosts = [_HOST.fullmatch(each) for each in headers.getlist("host")]
    if len(hosts) != 1 or hosts[0] is None or not is_loopback(hosts[0]["address"] or hosts[0]["name"]):
        return "the Host header must be localhost or a loopback address" + way_out
    return None


def _error(status_code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status_code)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        answer = _error(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    if isinstance(error, ServeError):
        return _error(error.status.http, str(error))
    if not isinstance(error, TierstoreError):  # it goes on to the server, which logs it
        return _error(500, f"internal error ({type(error).__name__}); the server's log tells more")
    status = 507 if isinstance(error, DiskFullError) else getattr(error, "http_status", 500)
    if status >= 500:
        _LOG.warning("%s %s: %s", request.method, request.url.path, error)
    return _error(status, str(error))
