"""The status page, its data, and /metrics: what may be looked at."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...report.page import BASE_STYLE
from .metrics import CONTENT_TYPE, WINDOW_SECONDS, Metrics, Source
from .status import snapshot

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def monitoring_routes(metrics: Metrics, source: Source) -> list[Route]:
    """GET / (the status page), /status.json (``?seconds=N``: of the last N) and /metrics; threads make the last two."""
    page = Path(__file__).with_name("page.html").read_bytes().replace(b"/* report/base.css */", BASE_STYLE.encode())
    page_headers = {**_HEADERS, "Content-Security-Policy": _content_security_policy(page)}

    async def show_page(_: Request) -> Response:
        return Response(page, media_type="text/html", headers=page_headers)

    async def show_status(request: Request) -> Response:
        seconds = int(given[:4]) if (given := request.query_params.get("seconds", "")).isdecimal() else WINDOW_SECONDS
        body = orjson.dumps(await run_in_threadpool(snapshot, metrics, source, seconds))
        return Response(body, media_type="application/json", headers=_HEADERS)

    async def show_metrics(_: Request) -> Response:
        body = await run_in_threadpool(metrics.expose)
        return Response(body, headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    shown = {"/": show_page, "/status.json": show_status, "/metrics": show_metrics}
    return [Route(path, show, methods=["GET"]) for path, show in shown.items()]


def _content_security_policy(page: bytes) -> str:
    """Only the page's own script and style run, known by their hashes, and they speak to this server alone."""
    own = f"script-src {_hashes(page, b'script')}; style-src {_hashes(page, b'style')}; connect-src 'self'"
    nothing = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {own}; img-src data:; {nothing}"


def _hashes(page: bytes, element: bytes) -> str:
    texts = re.findall(rb"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)
