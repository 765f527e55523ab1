"""The status page, its data, and /metrics: what may be looked at."""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import psutil
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...report.page import BASE_STYLE
from ...system.sizes import machine_memory_bytes
from .metrics import CONTENT_TYPE, OK, OTHER, WINDOW_SECONDS, Latencies, Metrics, Source, summarize

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def monitoring_routes(metrics: Metrics, source: Source) -> list[Route]:
    """GET / (the status page), /status.json (``?seconds=N``: of the last N) and /metrics; the last two are made in a
    thread, as that takes milliseconds."""
    page = Path(__file__).with_name("page.html").read_bytes().replace(b"/* report/base.css */", BASE_STYLE.encode())
    # Only the page's own script and style run, known by their hashes, and they speak to this server alone.
    own = f"script-src {_hashes(page, b'script')}; style-src {_hashes(page, b'style')}; connect-src 'self'"
    nothing = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    policy = f"default-src 'none'; {own}; img-src data:; {nothing}"
    page_headers = {**_HEADERS, "Content-Security-Policy": policy}

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


def _hashes(page: bytes, element: bytes) -> str:
    texts = re.findall(rb"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)


Seconds = Sequence[Mapping[str, Latencies]]
"""Of each second, the latencies by model."""


def snapshot(metrics: Metrics, source: Source, last_seconds: int = WINDOW_SECONDS) -> dict[str, Any]:
    """The state now, ready for JSON; for any thread. ``recent`` and ``history`` are of so many last whole seconds, a
    minute of them at most, oldest first; all other counts are since the start."""
    seconds, state, last = metrics.window.seconds()[-max(1, last_seconds) :], source(), metrics.last_update
    updates, update_failures, refused, out_of_range = metrics.totals()
    requests, queued = metrics.requests(), state.queued_samples
    return {
        "server": {
            "worker": metrics.worker,
            "live": state.live,
            "ready": state.ready,
            "uptime_seconds": metrics.clock() - metrics.started,
            "window_seconds": WINDOW_SECONDS,
        },
        "version": {
            "served": state.version,
            "newest": state.newest_version,
            "staleness_seconds": state.staleness_seconds,
            "updates": updates,
            "update_failures": update_failures,
            "last_update": last
            and {"version": last.version, "seconds": last.seconds, "age_seconds": metrics.clock() - last.at},
        },
        "watch": state.watch and state.watch._asdict(),
        "stores": [
            {"name": name, "ready": each.ready, "served": each.version, "newest": each.newest_version}
            | {"watch": each.watch and each.watch._asdict()}
            for name, each in state.stores.items()
        ],
        "requests": _requests(sum(requests.values(), Counter()), seconds, refused),
        "models": [  # and last, once they were asked for, names that are no model's
            {
                **_model(name, by_status, seconds),
                **metrics.batches(name),
                "queued_samples": queued.get(name, 0),
                "ids_out_of_range": out_of_range.get(name, 0),
            }
            for name, by_status in requests.items()
            if name != OTHER or by_status or name in queued
        ],
        "tiers": [
            {"name": name, **tier._asdict(), "hit_rate": tier.hit_rate if tier.unique else None}
            for name, tier in state.tiers.tiers.items()
        ],
        "tables": [table._asdict() for table in state.tables],
        "memory": {"resident_bytes": psutil.Process().memory_info().rss, "machine_bytes": machine_memory_bytes()},
    }


def _requests(by_status: Counter[str], seconds: Seconds, refused: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    together = [np.concatenate([np.empty(0), *second.values()]) for second in seconds]
    history = [summarize([each]) for each in together]
    return {
        **_totals(by_status),
        "recent": summarize(together)._asdict(),
        "history": {
            "requests": [len(each) for each in together],
            "failed": [each.failed_per_second for each in history],
            "seconds_p50": [each.seconds_p50 for each in history],
            "seconds_p99": [each.seconds_p99 for each in history],
        },
        "refused": [
            {"protocol": protocol, "status": status, "count": count}
            for (protocol, status), count in sorted(refused.items())
        ],
    }


def _model(name: str, by_status: Counter[str], seconds: Seconds) -> dict[str, Any]:
    own = [second.get(name, np.empty(0)) for second in seconds]
    recent = {"recent": summarize(own)._asdict(), "history": {"requests": [len(each) for each in own]}}
    return {"name": name, **_totals(by_status), **recent}


def _totals(by_status: Counter[str]) -> dict[str, Any]:
    return {"total": by_status.total(), "failed": by_status.total() - by_status[OK], "by_status": dict(by_status)}
