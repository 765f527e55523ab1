"""The admin port through real sockets: what it shows, what it does, and for whom."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.monitored import FakeSource, serving
from tierstore.errors import TierstoreError
from tierstore.serve.admin.app import ADMIN_HEADER, admin_app, admin_routes
from tierstore.serve.admin.offer import UpdateError
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.monitoring.app import monitoring_routes
from tierstore.serve.monitoring.metrics import Metrics, StateCollector

TOKEN = "correct-horse"
JSON = {"content-type": "application/json"}
ANSWERS = {"refresh": 8, "rollback": 6, "drain": True, "resume": False}


class Port:
    """An admin port's parts; notes what it is told to do, and raises ``error`` if it has one."""

    def __init__(self, token: str | None = None) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        metrics, source = Metrics(["dlrm"]), FakeSource()
        metrics.add(StateCollector(source))
        calls = admin_routes(**{name: self._call(name, answer) for name, answer in ANSWERS.items()})
        self.app = admin_app([*monitoring_routes(metrics, source), *calls], token=token)

    def _call(self, name: str, answer: object) -> Any:
        async def call() -> object:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            return answer

        return call


@pytest.fixture(scope="module")
def opened() -> Iterator[httpx.Client]:
    """One server for all, whose ``app`` is exchanged."""

    async def app(*call: Any) -> None:
        await client.app(*call)  # type: ignore[attr-defined]

    with serving(app) as served, httpx.Client(base_url=served.url, timeout=10) as client:
        yield client


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def wary() -> Port:
    return Port(TOKEN)


@pytest.fixture
def client(opened: Any, port: Port) -> Any:
    opened.app = port.app
    return opened


def test_page_runs_nothing_but_its_own_script(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{element}-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", answer.text)
    assert not re.search(r"(?:src|href)=\"(?!data:)", answer.text), "an external resource"


def test_calls(client: httpx.Client, port: Port) -> None:
    for headers in (JSON, {"content-type": "Application/JSON; charset=utf-8"}, {ADMIN_HEADER: "1"}):
        for call, found in ANSWERS.items():
            answer = client.post(f"/admin/{call}", headers=headers)
            key = "draining" if isinstance(found, bool) else "version"
            assert (answer.status_code, answer.json()) == (200, {key: found})
    assert port.calls == [*ANSWERS] * 3


ERRORS = {
    "no version before 7": (ServeError(Status.UNAVAILABLE, "no version before 7"), 503),
    "disk full": (TierstoreError("disk full"), 500),
    "another update is being applied": (UpdateError(409, "another update is being applied"), 409),
    "internal error (RuntimeError); the server's log tells more": (RuntimeError("secret"), 500),
}


def test_errors_are_told(client: httpx.Client, port: Port) -> None:
    for message, (error, status) in ERRORS.items():
        port.error = error
        # After one that it did not expect the server closes the connection.
        answer = client.post("/admin/rollback", headers={**JSON, "Connection": "close"})
        assert (answer.status_code, answer.json()) == (status, {"error": message})


# For whom


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_what_a_form_elsewhere_can_send_does_nothing(client: Any, port: Port, wary: Port) -> None:
    """Whether its browser shows a token or not."""
    for each in (port, wary):
        client.app = each.app
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = ({"content-type": kind} if kind else {}) | {"authorization": basic("admin", TOKEN)}
            answer = client.post("/admin/drain", headers=headers, content=b"x=1")
            assert answer.status_code == 403
            assert ADMIN_HEADER in answer.json()["error"]
        assert not each.calls


OWN_NAMES = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8002", "127.8.9.1", "[::1]", "[::1]:8002"]
OTHER_NAMES = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:127", "0.0.0.0"]
OTHER_NAMES += ["192.168.0.1", "[::2]", "[::1", "[::1]evil.example", "localhost:80:evil.example", "localhost@a.b"]


def ask_from(app: Any, address: str, **headers: str) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app, client=(address, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/metrics", headers=headers)).status_code

    return asyncio.run(ask())


def test_without_a_token_only_this_machine_is_answered_by_its_own_names(client: httpx.Client, port: Port) -> None:
    for host in OWN_NAMES:
        assert client.get("/metrics", headers={"host": host}).status_code == 200, host
    for host in OTHER_NAMES:
        for method, path in (("GET", "/metrics"), ("POST", "/admin/drain")):
            answer = client.request(method, path, headers={"host": host, **JSON})
            assert (answer.status_code, "token" in answer.json()["error"]) == (403, True), host
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"):
        assert client.get("/metrics", headers={header: "127.0.0.1"}).status_code == 403
    assert not port.calls
    for address in ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"):
        assert ask_from(port.app, address) == 200, address
    for address in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", ""):
        assert ask_from(port.app, address) == 403, address


RIGHT = [f"bearer  {TOKEN}", basic("admin", TOKEN), basic("", TOKEN) + " "]
WRONG = [f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", f"Basic {TOKEN}"]
WRONG += ["", "Bearer", TOKEN, basic(TOKEN, ""), "Basic !!!", "Basic /w==", "Bearer caf\u00e9"]


def test_with_a_token_all_who_show_it_are_answered_and_nobody_else(client: Any, wary: Port) -> None:
    client.app = wary.app
    for shown in RIGHT:
        assert ask_from(wary.app, "192.0.2.7", authorization=shown, host="server.example") == 200
    for headers in ({}, *({"authorization": shown.encode("latin-1")} for shown in WRONG)):
        answer = client.get("/status.json", headers=headers)
        assert (answer.status_code, set(answer.json())) == (401, {"error"}), headers
        assert "Basic" in answer.headers["www-authenticate"]
        assert client.post("/admin/drain", headers={**headers, **JSON}).status_code == 401
    assert not wary.calls
    for token in ("", " ", "two words", "caf\u00e9", "line\n"):
        with pytest.raises(ValueError, match="token"):
            admin_app([], token=token)
