"""REST over plain HTTP: statuses, ids, encodings, tokens, TLS, what happens to who goes away, and how it stops."""

import asyncio
import gzip
import ssl
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.serve.fakes import VERSION, FakeEngine
from tests.serve.rest_server import SECONDS, RestServer, read_answer, read_to_end, serving
from tierstore.serve.limits import Budget, Limits
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.rest.app import RestApp
from tierstore.serve.rest.body import LONG_BYTES, read_body
from tierstore.serve.rest.server import HttpServer, listen
from tierstore.serve.tls import Tls

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2.5, -3]}]}
DOUBLED = {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 5.0, -6.0]}
INFER = "/v2/models/double/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[RestServer]:
    with serving(limits=Limits(body_bytes=100_000, json_bytes=50_000)) as running:
        yield running


@pytest.fixture
def client(server: RestServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.address}", timeout=SECONDS, trust_env=False) as connected:
        yield connected


def error_of(response: httpx.Response, status: int) -> str:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    return body["error"]


def test_infer(client: httpx.Client) -> None:
    response = client.post(INFER, json=X)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"model_name": "double", "model_version": VERSION, "outputs": [DOUBLED]}
    versioned = client.post(f"/v2/models/double/versions/{VERSION}/infer", json=X)
    assert versioned.json() == response.json()


def test_binary_output_of_json_input(client: httpx.Client) -> None:
    response = client.post(INFER, json={**X, "parameters": {"binary_data_output": True}})
    length = int(response.headers["inference-header-content-length"])
    (output,) = orjson.loads(response.content[:length])["outputs"]
    assert output == {"name": "y", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
    assert np.frombuffer(response.content[length:], np.float32).tolist() == [2, 5, -6]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/v1", 404),
        ("/v2/nothing", 404),
        ("/v2/models", 404),
        ("/v2/models/double/nothing", 404),
        ("/v2/models/double/versions", 404),
        ("/v2/models/double/versions//ready", 404),
        ("/v2/models/d%6Fuble/ready", 200),
        ("/v2/models/double%2Fready", 404),
        ("/v2/models/%ff%00", 404),
        ("/v2/" + "n" * 5000, 404),
        ("/v2/", 200),
        ("/v2?query=1", 200),
        (INFER, 405),
    ],
)
def test_paths(client: httpx.Client, path: str, status: int) -> None:
    response = client.get(path)
    if status == 200:
        assert response.status_code == 200
    else:
        assert len(error_of(response, status)) < 300


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_methods(client: httpx.Client, method: str) -> None:
    response = client.request(method, "/v2/health/live")
    assert "GET" in error_of(response, 405)
    assert response.headers["allow"] == "GET, HEAD"
    if method != "POST":
        response = client.request(method, INFER)
        assert "POST" in error_of(response, 405)
        assert response.headers["allow"] == "POST"


def test_head_has_headers_only(client: httpx.Client) -> None:
    response = client.head("/v2")
    assert response.status_code == 200
    assert response.content == b""
    assert int(response.headers["content-length"]) == len(client.get("/v2").content)


def test_not_ready_and_not_live(client: httpx.Client, server: RestServer) -> None:
    server.engine.is_live = server.engine.is_ready = False
    try:
        for path, body in [
            ("/v2/health/live", {"live": False}),
            ("/v2/health/ready", {"ready": False}),
            ("/v2/models/double/ready", {"name": "double", "ready": False}),
        ]:
            response = client.get(path)
            assert (response.status_code, response.json()) == (503, body)
    finally:
        server.engine.is_live = server.engine.is_ready = True


@pytest.mark.parametrize(
    ("header", "body", "used", "returned"),
    [
        (None, None, "", None),
        ("from-header", None, "from-header", "from-header"),
        ("from-header", "from-body", "from-body", "from-body"),
        ("from-header", "", "from-header", "from-header"),
        (None, "é\r\nset-cookie: a=b", "é\r\nset-cookie: a=b", None),
    ],
)
def test_request_id(
    client: httpx.Client, server: RestServer, header: str | None, body: str | None, used: str, returned: str | None
) -> None:
    message = X if body is None else {**X, "id": body}
    response = client.post(INFER, json=message, headers={} if header is None else {"X-Request-Id": header})
    assert server.engine.seen[-1].id == used
    assert response.json().get("id", "") == used
    assert response.headers.get("x-request-id") == returned
    assert "set-cookie" not in response.headers


def test_request_id_of_a_request_that_fails(client: httpx.Client) -> None:
    headers = {"X-Request-Id": "mine"}
    assert client.post("/v2/models/full/infer", json=X, headers=headers).headers["x-request-id"] == "mine"
    assert client.post(INFER, content=b"{", headers=headers).headers["x-request-id"] == "mine"
    error = error_of(client.post(INFER, json=X, headers={"X-Request-Id": "i" * 2000}), 400)
    assert "X-Request-Id" in error


def test_refusals_are_counted(client: httpx.Client, server: RestServer) -> None:
    server.engine.refused.clear()
    seen = len(server.engine.seen)
    error = error_of(client.post(INFER, content=b"{"), 400)
    assert "not JSON" in error
    assert len(server.engine.seen) == seen
    ((protocol, counted),) = server.engine.refused
    assert protocol == "http"
    assert str(counted) == error


@pytest.mark.parametrize("length", ["-1", "5.0", "x", "1" * 30, "", "+5", "999999"])
def test_wrong_length_of_the_json(client: httpx.Client, length: str) -> None:
    response = client.post(INFER, json=X, headers={"Inference-Header-Content-Length": length})
    assert "Inference-Header-Content-Length" in error_of(response, 400)


def gzipped(data: bytes) -> bytes:
    """Without the time: processes that share the tests must name them alike."""
    return gzip.compress(data, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    compress = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compress.compress(data) + compress.flush()


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzipped(orjson.dumps(X)), 200),
        ("GZIP", gzipped(orjson.dumps(X)), 200),
        ("deflate", zlib.compress(orjson.dumps(X)), 200),
        ("identity", orjson.dumps(X), 200),
        ("gzip", gzipped(b" " * 40_000 + orjson.dumps(X)), 200),
        ("gzip", gzipped(bytes(10_000_000)), 413),
        ("gzip", gzipped(gzipped(bytes(10_000_000))), 400),
        ("deflate", zlib.compress(bytes(10_000_000)), 413),
        ("gzip", gzipped(orjson.dumps(X))[:-1], 400),
        ("gzip", gzipped(orjson.dumps(X)) + b"more", 400),
        ("gzip", gzipped(orjson.dumps(X)) * 2, 400),
        ("gzip", orjson.dumps(X), 400),
        ("gzip", b"", 400),
        ("deflate", raw_deflate(orjson.dumps(X)), 400),
        ("br", orjson.dumps(X), 400),
        ("gzip, gzip", orjson.dumps(X), 400),
        ("", orjson.dumps(X), 400),
    ],
)
def test_content_encoding(client: httpx.Client, server: RestServer, encoding: str, body: bytes, status: int) -> None:
    response = client.post(INFER, content=body, headers={"Content-Encoding": encoding})
    if status == 200:
        assert response.json()["outputs"] == [DOUBLED]
    else:
        error = error_of(response, status)
        assert status != 413 or "longer than 100000 bytes" in error
    server.wait_until(lambda: server.app.front.requests.held == 0)


NOTHING = b"\x00\x00\x00\xff\xff"
"""A block of a deflate stream that inflates to no bytes."""


@pytest.mark.parametrize(
    ("encoding", "first", "status"),
    [
        ("gzip", gzipped(orjson.dumps(X)) + b"more", Status.INVALID),
        ("deflate", b"\x78\x01" + NOTHING * 199, Status.TOO_LARGE),
    ],
)
def test_what_cannot_become_a_body_is_not_read_to_its_end(encoding: str, first: bytes, status: Status) -> None:
    received = []

    async def receive() -> dict[str, Any]:
        received.append(NOTHING if received else first)
        assert len(received) < 10
        return {"type": "http.request", "body": received[-1], "more_body": True}

    headers = {b"content-encoding": encoding.encode()}
    with Budget(1 << 30, "").hold() as held, pytest.raises(ServeError) as caught:
        asyncio.run(read_body(held, 1000, headers, receive, asyncio.Lock()))
    assert caught.value.status is status


def test_long_bodies_wait_for_their_turn_and_short_ones_for_none() -> None:
    async def read(num_parts: int, turn: asyncio.Lock) -> int:
        parts = iter(range(num_parts))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(LONG_BYTES), "more_body": next(parts) < num_parts - 1}

        with Budget(1 << 30, "").hold() as held:
            return len(await read_body(held, 1 << 30, {}, receive, turn))

    async def read_beside() -> None:
        turn = asyncio.Lock()
        async with turn:
            long = asyncio.create_task(read(3, turn))
            assert await read(1, turn) == LONG_BYTES
            await asyncio.sleep(0.01)
            assert not long.done()
        assert await long == 3 * LONG_BYTES

    asyncio.run(read_beside())


def test_bodies_that_are_too_large(client: httpx.Client, server: RestServer) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b" " * 10_000 for _ in range(11))

    assert "longer than 100000 bytes" in error_of(client.post(INFER, content=b" " * 100_001), 413)
    assert "longer than 100000 bytes" in error_of(client.post(INFER, content=chunks()), 413)
    assert "send large tensors as binary data" in error_of(client.post(INFER, content=b" " * 50_001), 413)
    # The connection goes on after each.
    assert client.post(INFER, json=X).status_code == 200
    server.wait_until(lambda: server.app.front.requests.held == 0)


def test_a_body_is_refused_by_its_length_alone(server: RestServer) -> None:
    with server.connect() as sock:
        sock.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 100001\r\n\r\n")
        assert read_answer(sock).status == 413


def test_all_bodies_together_are_bounded() -> None:
    limits = Limits(body_bytes=10_000, bodies_bytes=15_000)
    with serving(limits=limits) as server, server.connect() as first, server.connect() as second:
        head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\n\r\n"
        first.sendall(head + b" " * 9000)
        server.wait_until(lambda: server.app.front.requests.held == 9000)
        second.sendall(head + b" " * 10_000)
        answer = read_answer(second)
        assert answer.status == 503
        assert b"try again" in answer.body
        first.sendall(orjson.dumps(X).rjust(1000))
        assert read_answer(first).status == 200
        server.wait_until(lambda: server.app.front.requests.held == 0)


def test_an_unexpected_error_tells_nothing(client: httpx.Client, server: RestServer) -> None:
    async def fail(request: Any) -> None:
        raise RuntimeError("secret")

    server.engine.infer = fail  # type: ignore[method-assign, assignment]
    try:
        error = error_of(client.post(INFER, json=X), 500)
    finally:
        del server.engine.infer
    assert "secret" not in error
    assert client.post(INFER, json=X).status_code == 200


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_who_disconnects_is_not_worked_for(use_uvloop: bool) -> None:
    body = orjson.dumps(X)
    request = b"POST /v2/models/slow/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with serving(use_uvloop=use_uvloop) as server:
        engine = server.engine
        with server.connect() as sock, server.connect() as pipelined:
            sock.sendall(request)
            pipelined.sendall(request * 2)
            server.wait_until(lambda: len(engine.seen) == 2)
            assert not engine.cancelled
        server.wait_until(lambda: len(engine.cancelled) == 2)
        server.wait_until(lambda: server.app.front.requests.held == 0 and server.server.num_connections == 0)
        assert len(engine.seen) == 2, "the second of the pipelined ones was begun"


def test_who_disconnects_amid_a_body_is_forgotten(server: RestServer) -> None:
    with server.connect() as sock:
        sock.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n" + b" " * 999)
        server.wait_until(lambda: server.app.front.requests.held == 999)
    server.wait_until(lambda: server.app.front.requests.held == 0)


# Tokens


def test_token() -> None:
    with serving(token="right") as server, httpx.Client(base_url=f"http://{server.address}", trust_env=False) as client:
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200
        wrong = ["Bearer wrong", "Bearer", "right", "Basic right", "Bearer right2", "Bearer righ", ""]
        for header in [None, *wrong]:
            for path in ("/v2", "/v2/health/live/", "/v2/models/double"):
                response = client.get(path, headers={} if header is None else {"Authorization": header})
                assert "token" in error_of(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
        assert {error.status for _, error in server.engine.refused} == {Status.UNAUTHENTICATED}
        twice = [("Authorization", "Bearer right"), ("Authorization", "Bearer wrong")]
        assert client.get("/v2", headers=twice).status_code == 401
        for header in ("Bearer right", "bearer right", "Bearer  right"):
            assert client.post(INFER, json=X, headers={"Authorization": header}).status_code == 200
        assert len(server.engine.seen) == 3


@pytest.mark.parametrize("token", ["", "with space", "é", "line\nbreak"])
def test_tokens_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        RestApp(FakeEngine(), token=token)


# Starting and stopping


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_tls(tls: Tls, use_uvloop: bool) -> None:
    trust = ssl.create_default_context(cafile=tls.certificate)
    with serving(tls=tls, use_uvloop=use_uvloop) as server:
        with httpx.Client(base_url=f"https://{server.address}", verify=trust, trust_env=False) as client:
            assert client.post(INFER, json=X).json()["outputs"] == [DOUBLED]
        with server.connect() as sock, trust.wrap_socket(sock, server_hostname="127.0.0.1") as secured:
            secured.sendall(b"nonsense\r\n\r\n")
            assert read_answer(secured).status == 400
        with server.connect() as sock:
            sock.sendall(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"HTTP" not in read_to_end(sock)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_who_does_not_shake_hands_is_cut_off(tls: Tls, use_uvloop: bool) -> None:
    with serving(tls=tls, use_uvloop=use_uvloop, limits=Limits(receive_seconds=0.2)) as server:
        with server.connect() as silent, server.connect() as slow:
            slow.sendall(b"\x16\x03\x01\x02\x00")  # where a handshake begins
            assert read_to_end(silent) == b""
            assert read_to_end(slow) == b""
        assert server.server.num_connections == 0


def test_tls_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.pem"):
        HttpServer(RestApp(FakeEngine()), tls=Tls(tmp_path / "no.pem", tmp_path / "no.key"))


def test_several_listeners_share_a_port() -> None:
    first = listen("127.0.0.1", 0, reuse_port=True)
    second = listen("127.0.0.1", first[0].getsockname()[1], reuse_port=True)
    with serving(listeners=first) as one, serving(listeners=second) as other:
        assert one.port == other.port
        with httpx.Client(headers={"Connection": "close"}, trust_env=False) as client:
            for _ in range(20):
                assert client.post(f"http://{one.address}{INFER}", json=X).status_code == 200
        assert len(one.engine.seen) + len(other.engine.seen) == 20


def test_a_port_that_is_taken() -> None:
    with serving() as server, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", server.port)


@pytest.mark.parametrize(("host", "asked"), [("::1", "[::1]"), ("::", "127.0.0.1")])
def test_listens_on_ipv6_whose_wildcard_is_that_of_ipv4_too(host: str, asked: str) -> None:
    try:
        listener = listen(host, 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(listeners=listener) as server:
        assert httpx.get(f"http://{asked}:{server.port}/v2", trust_env=False).status_code == 200


def test_stop_lets_what_is_under_way_finish() -> None:
    with serving() as server, ThreadPoolExecutor(2) as pool, server.connect() as idle:
        url = f"http://{server.address}/v2/models/slow/infer"
        answers = [pool.submit(httpx.post, url, json=X, timeout=SECONDS, trust_env=False) for _ in range(2)]
        server.wait_until(lambda: len(server.engine.seen) == 2)
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(SECONDS), server.loop)
        assert idle.recv(1) == b"", "a connection without a request is closed at once"
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        assert not stopping.done()
        server.loop.call_soon_threadsafe(server.engine.let_go.set)
        assert [answer.result(SECONDS).status_code for answer in answers] == [200, 200]
        stopping.result(SECONDS)
        assert server.server.num_connections == 0


def test_stop_cuts_off_what_does_not_finish() -> None:
    with serving() as server, ThreadPoolExecutor(1) as pool:
        url = f"http://{server.address}/v2/models/slow/infer"
        answer = pool.submit(httpx.post, url, json=X, timeout=SECONDS, trust_env=False)
        server.wait_until(lambda: len(server.engine.seen) == 1)
        server.call(server.server.stop(0.01))
        assert len(server.engine.cancelled) == 1
        with pytest.raises(httpx.TransportError):
            answer.result(SECONDS)


def test_stop_before_start_and_twice() -> None:
    with serving() as server:
        server.call(server.server.stop(1))
        server.call(server.server.stop(1))
        assert server.server.num_connections == 0


def test_the_server_leaves_threads_and_signals_alone() -> None:
    before = set(threading.enumerate())
    with serving() as server:
        assert server.port
    assert set(threading.enumerate()) == before


def test_an_engine_that_is_asked_in_its_loop() -> None:
    """Several servers over one engine, as a process with two ports would have."""
    engine = FakeEngine()
    with serving(engine=engine) as one, serving(engine=engine) as other:
        for server in (one, other):
            assert httpx.post(f"http://{server.address}{INFER}", json=X, trust_env=False).status_code == 200
    assert len(engine.seen) == 2
