"""What only HTTP has: paths, methods, encodings, request ids, JSON; how bodies are read and answers written."""

import asyncio
import gzip
import socket
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.serve.fakes import VERSION, Held
from tests.serve.fronts import SECONDS, Fronted, read_answer, serving
from tierstore.serve.limits import Budget, Limits
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.rest import app, infer_body
from tierstore.serve.rest.app import read_body

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2.5, -3]}]}
DOUBLED = {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 5.0, -6.0]}
INFER = "/v2/models/double/infer"


@pytest.fixture(scope="module")
def server() -> Iterator[Fronted]:
    with serving("http", Limits(body_bytes=100_000, json_bytes=50_000)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Fronted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.address}", timeout=SECONDS, trust_env=False) as connected:
        yield connected


def error_of(response: httpx.Response, status: int) -> str:
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    body = response.json()
    assert list(body) == ["error"]
    return str(body["error"])


def test_infer(client: httpx.Client) -> None:
    response = client.post(f"/v2/models/double/versions/{VERSION}/infer", json=X)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json() == {"model_name": "double", "model_version": VERSION, "outputs": [DOUBLED]}
    two = {"inputs": [{**X["inputs"][0], "name": name} for name in "ab"], "outputs": [{"name": "a"}, {"name": "b"}]}
    two["outputs"][0]["parameters"] = {"binary_data": False}
    response = client.post("/v2/models/echo/infer", json={**two, "parameters": {"binary_data_output": True}})
    length = int(response.headers["inference-header-content-length"])
    a, b = orjson.loads(response.content[:length])["outputs"]
    assert (a["data"], b["parameters"]) == ([1, 2.5, -3], {"binary_data_size": 12})
    assert np.frombuffer(response.content[length:], np.float32).tolist() == [1, 2.5, -3]


PATHS = dict.fromkeys(("/", "/v2/nothing", "/v2/models/double/nothing", "/v2/models/double/versions//ready"), 404)
PATHS |= dict.fromkeys(("/v2/models/double%2Fready", "/v2/models/%ff%00", "/v2/" + "n" * 5000), 404)
PATHS |= {"/v2/models/d%6Fuble/ready": 200, "/v2?query=1": 200, INFER: 405}
IDS = {
    (None, None): ("", None),
    ("from-header", "from-body"): ("from-body", "from-body"),
    ("from-header", ""): ("from-header", "from-header"),
    (None, "é\r\nset-cookie: a=b"): ("é\r\nset-cookie: a=b", None),
}


def test_paths_and_request_ids(client: httpx.Client, server: Fronted) -> None:
    for path, status in PATHS.items():
        response = client.get(path)
        assert response.status_code == status
        assert status == 200 or len(error_of(response, status)) < 300
    for (header, body), (used, returned) in IDS.items():
        headers = {} if header is None else {"X-Request-Id": header}
        response = client.post(INFER, json=X if body is None else {**X, "id": body}, headers=headers)
        assert server.engine.seen[-1].id == response.json().get("id", "") == used
        assert response.headers.get("x-request-id") == returned
        assert "set-cookie" not in response.headers
        assert client.post("/v2/models/full/infer", json=X, headers=headers).headers.get("x-request-id") == header
        assert client.post(INFER, headers=headers).headers.get("x-request-id") == header
    assert "id has more than" in error_of(client.post(INFER, json=X, headers={"X-Request-Id": "i" * 2000}), 400)


def test_wrong_length_of_the_json(client: httpx.Client) -> None:
    for length in ("-1", "5.0", "x", "1" * 30, "", "+5", "999999"):
        response = client.post(INFER, json=X, headers={"Inference-Header-Content-Length": length})
        assert "Inference-Header-Content-Length" in error_of(response, 400)


# Bodies.


gzipped = gzip.compress


def raw_deflate(data: bytes) -> bytes:
    compress = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compress.compress(data) + compress.flush()


JSON = orjson.dumps(X)
ENCODED = [
    ("GZIP", gzipped(JSON), 200),
    ("deflate", zlib.compress(JSON), 200),
    ("identity", JSON, 200),
    ("gzip", gzipped(b" " * 40_000 + JSON), 200),
    ("gzip", gzipped(bytes(10_000_000)), 413),
    ("gzip", gzipped(gzipped(bytes(10_000_000))), 400),
    ("deflate", zlib.compress(bytes(10_000_000)), 413),
    ("gzip", gzipped(JSON)[:-1], 400),
    ("gzip", gzipped(JSON) * 2, 400),
    ("deflate", raw_deflate(JSON), 400),
    ("br", JSON, 400),
]


def test_content_encoding(client: httpx.Client, server: Fronted) -> None:
    for encoding, body, status in ENCODED:
        response = client.post(INFER, content=body, headers={"Content-Encoding": encoding})
        if status == 200:
            assert response.json()["outputs"] == [DOUBLED]
        else:
            assert error_of(response, status)
    server.wait_until(lambda: server.front.requests.held == 0)


NOTHING = b"\x00\x00\x00\xff\xff"
"""A block of a deflate stream that inflates to no bytes."""


@pytest.mark.parametrize(
    ("encoding", "first", "status"),
    [("gzip", gzipped(JSON) + b"more", Status.INVALID), ("deflate", b"\x78\x01" + NOTHING * 199, Status.TOO_LARGE)],
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


def test_bodies_that_are_too_large(client: httpx.Client, server: Fronted) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (b" " * 10_000 for _ in range(11))

    assert error_of(client.post(INFER, content=b" " * 100_001), 413)
    assert error_of(client.post(INFER, content=chunks()), 413)
    assert "binary data" in error_of(client.post(INFER, content=b" " * 50_001), 413)
    assert client.post(INFER, json=X).status_code == 200, "the connection goes on after each"
    with server.connect() as sock:
        sock.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 100001\r\n\r\n")
        assert read_answer(sock).status == 413, "by its length alone"
    server.wait_until(lambda: server.front.requests.held == 0)


def post(model: str, body: bytes, length: int | None = None) -> bytes:
    """A whole request; of a body whose first ``length`` bytes are JSON."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    head += "" if length is None else f"inference-header-content-length: {length}\r\n"
    return head.encode() + b"\r\n" + body


def numbers(count: int, *, is_binary_output: bool = True) -> tuple[bytes, int]:
    """A body with so many of FP32, and the length of its JSON."""
    x = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    text = orjson.dumps({"inputs": [x], "parameters": {"binary_data_output": is_binary_output}})
    return text + bytes(4 * count), len(text)


def test_long_bodies_are_taken_apart_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones in the loop."""
    threads: list[int] = []

    def parse(body: bytes, **options: Any) -> infer_body.InferCall:
        threads.append(threading.get_ident())
        return infer_body.parse_infer(body, **options)

    monkeypatch.setattr(app, "parse_infer", parse)
    with serving("http") as server:
        for count in (10, 1 << 19):
            with server.connect() as sock:
                sock.sendall(post("echo", *numbers(count)))
                assert read_answer(sock).status == 200
        short, long = (thread == server._thread.ident for thread in threads)
    assert (short, long) == (True, False)


# Answers.


def test_an_answer_that_nobody_waits_for_is_not_written_on(server: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with server.connect() as sock:
        sock.sendall(post("echo", *numbers(20_480, is_binary_output=False)))
        assert held.began.wait(SECONDS)
    server.wait_until(lambda: server.front.requests.held == server.front.unsent.held == 0)
    held.may_go_on.set()


def test_answers_that_nobody_reads_are_bounded() -> None:
    """Who asks for more than may wait is refused; who asks for little is answered all the same."""
    size = 4 << 20
    large = post("echo", *numbers(size // 4))
    with serving("http", Limits(responses_bytes=9 << 20)) as server:
        opened = []
        for count in (1, 2):
            opened.append(sock := socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(large)
            server.wait_until(lambda count=count: server.front.unsent.held >= count * size)
        for sent, status in ((large, 503), (post("double", JSON), 200)):
            with server.connect() as sock:
                sock.sendall(sent)
                assert read_answer(sock).status == status
        assert server.engine.refused[0][1].status is Status.OVERLOADED
        for sock in opened:
            sock.close()
        server.wait_free()
