"""The admin port through real sockets: what it shows, what it does, and for whom."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.serve.monitored import FakeSource, Served, serving
from tierstore.errors import TierstoreError
from tierstore.serve.admin.app import ADMIN_HEADER, admin_app, admin_routes
from tierstore.serve.admin.offer import UpdateError
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.monitoring.app import monitoring_routes
from tierstore.serve.monitoring.metrics import Metrics, StateCollector

TOKEN = "correct-horse"
JSON = {"content-type": "application/json"}


class FakeAdmin:
    """Notes what it is told to do; raises ``error`` if it has one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None

    def _call(self, name: str, answer: object) -> Any:
        async def call() -> object:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            return answer

        return call

    def routes(self) -> list[Route]:
        answers = {"refresh": 8, "rollback": 6, "drain": True, "resume": False}
        return admin_routes(**{name: self._call(name, answer) for name, answer in answers.items()})


class Port:
    """An admin port's parts."""

    def __init__(self, token: str | None = None) -> None:
        self.metrics = Metrics(["dlrm"])
        self.source = FakeSource()
        self.admin = FakeAdmin()
        self.metrics.add(StateCollector(self.source))
        self.app = admin_app([*monitoring_routes(self.metrics, self.source), *self.admin.routes()], token=token)


@pytest.fixture
def port() -> Port:
    return Port()


class Exchanged:
    """An app that can be exchanged for each test: one server for all."""

    def __init__(self) -> None:
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def exchanged() -> Exchanged:
    return Exchanged()


@pytest.fixture(scope="module")
def served(exchanged: Exchanged) -> Iterator[Served]:
    with serving(exchanged) as found:
        yield found


@pytest.fixture(scope="module")
def connections(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=10) as found:
        yield found


@pytest.fixture
def client(exchanged: Exchanged, port: Port, connections: httpx.Client) -> httpx.Client:
    exchanged.app = port.app
    return connections


# What it shows


def test_page_runs_nothing_but_its_own_script(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{element}-src"] == f"'sha256-{digest}'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", answer.text)
    assert not re.search(r"(?:src|href)=\"(?!data:)", answer.text), "an external resource"


# What it does


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("rollback", {"version": 6}),
        ("refresh", {"version": 8}),
        ("drain", {"draining": True}),
        ("resume", {"draining": False}),
    ],
)
@pytest.mark.parametrize("headers", [JSON, {"content-type": "Application/JSON; charset=utf-8"}, {ADMIN_HEADER: "1"}])
def test_calls(client: httpx.Client, port: Port, call: str, body: Any, headers: dict[str, str]) -> None:
    answer = client.post(f"/admin/{call}", headers=headers)
    assert (answer.status_code, answer.json()) == (200, body)
    assert port.admin.calls == [call]


@pytest.mark.parametrize(
    ("error", "status_code", "message"),
    [
        (ServeError(Status.UNAVAILABLE, "no version before 7"), 503, "no version before 7"),
        (TierstoreError("disk full"), 500, "disk full"),
        (UpdateError(409, "another update is being applied"), 409, "another update is being applied"),
        (RuntimeError("secret"), 500, "internal error (RuntimeError); the server's log tells more"),
    ],
)
def test_errors_are_told(client: httpx.Client, port: Port, error: Exception, status_code: int, message: str) -> None:
    port.admin.error = error
    # After one that it did not expect the server closes the connection, which the next test must not take for open.
    answer = client.post("/admin/rollback", headers={**JSON, "Connection": "close"})
    assert (answer.status_code, answer.json()) == (status_code, {"error": message})


# For whom


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_elsewhere_can_send_does_nothing(client: httpx.Client, exchanged: Exchanged, kind: str) -> None:
    """Whether its browser shows a token or not."""
    for token in (None, TOKEN):
        port = Port(token)
        exchanged.app = port.app
        headers = ({"content-type": kind} if kind else {}) | {"authorization": basic("admin", TOKEN)}
        answer = client.post("/admin/drain", headers=headers, content=b"x=1")
        assert answer.status_code == 403
        assert ADMIN_HEADER in answer.json()["error"]
        assert not port.admin.calls
        assert client.post("/admin/drain", headers={**headers, **JSON}).status_code == 200


OWN_NAMES = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8002", "127.8.9.1", "[::1]", "[::1]:8002"]
OTHER_NAMES = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:127", "0.0.0.0"]
OTHER_NAMES += ["192.168.0.1", "[::2]", "[::1", "[::1]evil.example", "localhost:80:evil.example", "localhost@a.b"]


def test_only_loopback_names_are_answered(client: httpx.Client, port: Port) -> None:
    for host in OWN_NAMES:
        assert client.get("/metrics", headers={"host": host}).status_code == 200, host
    for host in OTHER_NAMES:
        for method, path in (("GET", "/metrics"), ("POST", "/admin/drain")):
            answer = client.request(method, path, headers={"host": host, **JSON})
            assert (answer.status_code, "token" in answer.json()["error"]) == (403, True), host
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"):
        assert client.get("/metrics", headers={header: "127.0.0.1"}).status_code == 403
    assert not port.admin.calls


def ask_from(app: Any, peer: tuple[str, int], **headers: str) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app, client=peer)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/metrics", headers=headers)).status_code

    return asyncio.run(ask())


def test_without_a_token_only_this_machine_is_answered(port: Port) -> None:
    for address in ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"):
        assert ask_from(port.app, (address, 5000)) == 200, address
    for address in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", ""):
        assert ask_from(port.app, (address, 5000)) == 403, address


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


RIGHT = [f"Bearer {TOKEN}", f"bearer  {TOKEN}", basic("admin", TOKEN), basic("", TOKEN), basic("", TOKEN) + " "]
WRONG = [f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", f"Basic {TOKEN}"]
WRONG += [None, "", "Bearer", TOKEN, basic(TOKEN, ""), "Basic !!!", "Basic /w==", "Bearer caf\u00e9"]


def test_with_a_token_all_who_show_it_are_answered_and_nobody_else(client: httpx.Client, exchanged: Exchanged) -> None:
    port = Port(TOKEN)
    exchanged.app = port.app
    for shown in RIGHT:
        assert ask_from(port.app, ("192.0.2.7", 5000), authorization=shown, host="server.example") == 200
    for shown in WRONG:
        headers = {} if shown is None else {"authorization": shown.encode("latin-1")}
        answer = client.get("/status.json", headers=headers)
        assert (answer.status_code, set(answer.json())) == (401, {"error"}), shown
        assert "Basic" in answer.headers["www-authenticate"]
        assert client.post("/admin/drain", headers={**headers, **JSON}).status_code == 401
    assert not port.admin.calls
    for token in ("", " ", "two words", "caf\u00e9", "line\n"):
        with pytest.raises(ValueError, match="token"):
            admin_app([], token=token)
