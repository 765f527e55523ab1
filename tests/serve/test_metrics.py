"""Counts of a server as Prometheus reads them; the admin port, and who may ask it."""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fronts import serving
from tierstore.errors import TierstoreError
from tierstore.pool.stats import Stats, TierStats
from tierstore.serve.admin import ADMIN_HEADER, admin_app, admin_routes, metrics_route
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.metrics import WINDOW_SECONDS, Metrics, State, StateCollector, Window
from tierstore.serve.offer import UpdateError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


class FakeSource:
    def __init__(self) -> None:
        ddr = {"lookups": 50_000, "unique": 20_000, "hits": 15_000, "misses": 5_000, "evictions": 1_234}
        ssd = {"lookups": 5_000, "unique": 5_000, "hits": 4_000, "misses": 1_000, "bytes": 40_960, "bytes_read": 777}
        self.state = State(
            live=True,
            ready=True,
            version=7,
            newest_version=9,
            staleness_seconds=2.5,
            tiers=Stats(
                hbm=TierStats(),
                ddr=TierStats(**ddr, capacity_rows=8_000, bytes=3 << 20),
                ssd=TierStats(**ssd, capacity_rows=1_000_000),
            ),
            queued_samples={"dlrm": 17, "items": 0},
        )

    def __call__(self) -> State:
        return self.state


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[f"tierstore_{name}", frozenset({"worker": "0", **labels}.items())]


def require_histogram(found: Series, name: str, values: list[float], **labels: str) -> None:
    assert value(found, f"{name}_count", **labels) == len(values)
    assert value(found, f"{name}_sum", **labels) == pytest.approx(math.fsum(values))
    wanted = {("worker", "0"), *labels.items()}
    for (each, pairs), count in found.items():
        if each == f"tierstore_{name}_bucket" and wanted <= pairs:
            assert count == sum(each <= float(dict(pairs)["le"]) for each in values), (name, pairs)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(["dlrm", "items"], clock=clock)


def test_all_that_happens_is_counted(metrics: Metrics, clock: Clock) -> None:
    """And clients cannot make up series: models that are none are counted as one."""
    chance = random.Random(1)
    seconds_of: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    batches: dict[str, list[tuple[int, int, list[float], float]]] = defaultdict(list)
    refused: Counter[tuple[str, str]] = Counter()
    ids: Counter[str] = Counter()
    updates: list[float] = []
    for number in range(1000):
        name = chance.choice(["dlrm", "items", f"made up {number}"])
        model, protocol = "other" if name[0] == "m" else name, chance.choice(["http", "grpc"])
        status = chance.choice([None, None, *Status])
        # Bounds themselves too: a bucket holds what is at most its bound.
        seconds = chance.choice([0.001, 0.064, 10.0, chance.lognormvariate(-5, 2)])
        metrics.answered(name, protocol, status, seconds)
        seconds_of[model, protocol, status.name.lower() if status else "ok"].append(seconds)
        if number % 10 == 0 and model != "items":
            batch = (chance.randrange(1, 9), chance.randrange(1, 5000), [seconds, 0.1], seconds / 2)
            metrics.batched(name, *batch)
            batches[model].append(batch)
            metrics.out_of_range(name, number)
            ids[model] += number
        if number % 20 == 0:
            metrics.refused(protocol, Status.INVALID)
            refused[protocol, "invalid"] += 1
            metrics.updated(seconds)
            updates.append(seconds)
            metrics.update_failed()
    found = series(metrics)
    for (model, protocol, status_name), told in seconds_of.items():
        require_histogram(found, "request_seconds", told, model=model, protocol=protocol, status=status_name)
    assert not any(value.startswith("made up") for _, labels in found for _, value in labels)
    for model, told in batches.items():
        queries, samples, waits, computes = zip(*told, strict=True)
        for name, numbers in (("batch_queries", queries), ("batch_samples", samples)):
            assert value(found, f"{name}_count", model=model) == len(numbers)
            assert value(found, f"{name}_sum", model=model) == sum(numbers)
        require_histogram(found, "queue_seconds", [each for part in waits for each in part], model=model)
        require_histogram(found, "compute_seconds", list(computes), model=model)
        assert value(found, "ids_out_of_range_total", model=model) == ids[model]
    assert value(found, "batch_queries_count", model="items") == 0
    for (protocol, status_name), count in refused.items():
        assert value(found, "refused_requests_total", protocol=protocol, status=status_name) == count
    require_histogram(found, "update_seconds", updates)
    assert value(found, "update_failures_total") == len(updates)


def test_the_exposition_stays_small_with_many_models_and_every_series_tells_its_worker() -> None:
    """26 tables with their rows and bags, "ranking", "pooled" and "rows": unasked, and all asked over one protocol."""
    names = [f"{kind}.C{index}" for kind in ("pooled", "rows") for index in range(26)] + ["ranking", "pooled", "rows"]
    metrics = Metrics(names, worker=3)
    metrics.add(StateCollector(FakeSource()))
    idle = len(metrics.expose().splitlines())
    assert idle < 440
    for name in names:
        metrics.answered(name, "http", None, 0.1)
        metrics.batched(name, 1, 1, [0.1], 0.1)
    assert len(metrics.expose().splitlines()) - idle == len(names) * 3 * 19
    found = series(metrics)
    assert all(("worker", "3") in labels for _, labels in found)
    assert found["process_resident_memory_bytes", frozenset({("worker", "3")})] > 10 << 20
    assert not any(name.startswith("tierstore_request") for name, _ in series(Metrics(["dlrm"])))
    assert b"tierstore" not in prometheus_client.generate_latest(), "registries are apart"


def test_only_the_last_minute_counts(clock: Clock) -> None:
    window, chance = Window(clock), random.Random(4)
    told: dict[int, list[float]] = defaultdict(list)
    for _ in range(400):
        for _ in range(chance.randrange(4)):
            told[int(clock.now)].append(chance.lognormvariate(-5, 1.5))
            window.add(told[int(clock.now)][-1])
        clock.now += chance.choice([0.3, 0.7, 1.0, 1.0, 5.0, 70.0 if chance.random() < 0.05 else 0.5])
        now = int(clock.now)
        for seconds in (5, WINDOW_SECONDS, 600):
            first = now - min(seconds, WINDOW_SECONDS)
            assert window.latencies(seconds).tolist() == [
                one for each in range(first, now) for one in told.get(each, [])
            ]


TOKEN = "correct-horse"
JSON = {"content-type": "application/json"}
ANSWERS = {"refresh": 8, "rollback": 6}


class Port:
    """An admin port's parts; notes what it is told to do, and raises ``error`` if it has one."""

    def __init__(self, token: str | None = None) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        metrics, source = Metrics(["dlrm"]), FakeSource()
        metrics.add(StateCollector(source))
        calls = admin_routes(**{name: self._call(name, answer) for name, answer in ANSWERS.items()})
        self.app = admin_app([metrics_route(metrics), *calls], token=token)

    def _call(self, name: str, answer: object) -> Any:
        async def call() -> object:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            return answer

        return call


@pytest.fixture(scope="module")
def opened() -> Iterator[httpx.Client]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await client.app(scope, receive, send)  # type: ignore[attr-defined]

    with serving("http", app=app) as served, httpx.Client(base_url=served.url, timeout=10) as client:
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


def test_calls(client: httpx.Client, port: Port) -> None:
    for headers in (JSON, {"content-type": "Application/JSON; charset=utf-8"}, {ADMIN_HEADER: "1"}):
        for call, found in ANSWERS.items():
            answer = client.post(f"/admin/{call}", headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"version": found})
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


def test_what_a_form_elsewhere_can_send_does_nothing(client: Any, port: Port, wary: Port) -> None:
    """Whether its browser shows a token or not."""
    for each in (port, wary):
        client.app = each.app
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            headers = ({"content-type": kind} if kind else {}) | {"authorization": f"Bearer {TOKEN}"}
            answer = client.post("/admin/refresh", headers=headers, content=b"x=1")
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
        for method, path in (("GET", "/metrics"), ("POST", "/admin/refresh")):
            answer = client.request(method, path, headers={"host": host, **JSON})
            assert (answer.status_code, "token" in answer.json()["error"]) == (403, True), host
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"):
        assert client.get("/metrics", headers={header: "127.0.0.1"}).status_code == 403
    assert not port.calls
    for address in ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"):
        assert ask_from(port.app, address) == 200, address
    for address in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1", ""):
        assert ask_from(port.app, address) == 403, address


RIGHT = [f"bearer  {TOKEN}", f"Bearer {TOKEN} "]
WRONG = [f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", f"Basic {TOKEN}"]
WRONG += ["", "Bearer", TOKEN, "Bearer caf\u00e9"]


def test_with_a_token_all_who_show_it_are_answered_and_nobody_else(client: Any, wary: Port) -> None:
    client.app = wary.app
    for shown in RIGHT:
        assert ask_from(wary.app, "192.0.2.7", authorization=shown, host="server.example") == 200
    for headers in ({}, *({"authorization": shown.encode("latin-1")} for shown in WRONG)):
        answer = client.get("/metrics", headers=headers)
        assert (answer.status_code, set(answer.json())) == (401, {"error"}), headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/admin/refresh", headers={**headers, **JSON}).status_code == 401
    assert not wary.calls
    for token in ("", " ", "two words", "caf\u00e9", "line\n"):
        with pytest.raises(ValueError, match="token"):
            admin_app([], token=token)
