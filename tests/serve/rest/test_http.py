"""What only HTTP has: paths, encodings, bodies, and clients that are slow, greedy or speak nonsense."""

import contextlib
import gzip
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.fakes import VERSION, Held
from tests.serve.fronts import SECONDS, Fronted, read_answer, read_to_end, serving
from tierstore.serve.limits import Limits
from tierstore.serve.messages import Status
from tierstore.serve.rest import app, infer_body
from tierstore.serve.rest.server import MAX_PIPELINED

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


def test_paths_request_ids_and_lengths_of_the_json(client: httpx.Client, server: Fronted) -> None:
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
    for length in ("-1", "5.0", "x", "1" * 30, "", "+5", "999999"):
        response = client.post(INFER, json=X, headers={"Inference-Header-Content-Length": length})
        assert "Inference-Header-Content-Length" in error_of(response, 400)


JSON = orjson.dumps(X)


def test_compressed_bodies_are_refused(client: httpx.Client) -> None:
    assert client.post(INFER, content=JSON, headers={"Content-Encoding": "Identity"}).json()["outputs"] == [DOUBLED]
    response = client.post(INFER, content=gzip.compress(JSON), headers={"Content-Encoding": "gzip"})
    assert "'gzip' is not taken" in error_of(response, 400)


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


def echo(count: int, *, is_binary_output: bool = True) -> bytes:
    """A request with so many of FP32, which come back."""
    x = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    text = orjson.dumps({"inputs": [x], "parameters": {"binary_data_output": is_binary_output}})
    return post(b"echo", text + bytes(4 * count), headers=b"inference-header-content-length: %d\r\n" % len(text))


def test_long_bodies_are_taken_apart_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def parse(body: bytes, **options: Any) -> infer_body.InferCall:
        threads.append(threading.get_ident())
        return infer_body.parse_infer(body, **options)

    monkeypatch.setattr(app, "parse_infer", parse)
    with serving("http") as server:
        for count in (10, 1 << 19):
            with server.connect() as sock:
                sock.sendall(echo(count))
                assert read_answer(sock).status == 200
        short, long = (thread == server._thread.ident for thread in threads)
    assert (short, long) == (True, False)


def test_an_answer_that_nobody_waits_for_is_not_written_on(server: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with server.connect() as sock:
        sock.sendall(echo(20_480, is_binary_output=False))
        assert held.began.wait(SECONDS)
    server.wait_until(lambda: server.front.requests.held == server.front.unsent.held == 0)
    held.may_go_on.set()


def test_answers_that_nobody_reads_are_bounded() -> None:
    """Who asks for more than may wait is refused; who asks for little is answered all the same."""
    size = 4 << 20
    large = echo(size // 4)
    with serving("http", Limits(responses_bytes=9 << 20)) as server:
        opened = []
        for count in (1, 2):
            opened.append(sock := socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(large)
            server.wait_until(lambda count=count: server.front.unsent.held >= count * size)
        for sent, status in ((large, 503), (post(), 200)):
            with server.connect() as sock:
                sock.sendall(sent)
                assert read_answer(sock).status == status
        assert server.engine.refused[0][1].status is Status.OVERLOADED
        for sock in opened:
            sock.close()
        server.wait_free()


SHORT = 0.3
QUICK = Limits(
    body_bytes=1 << 20, header_bytes=4096, receive_seconds=SHORT, idle_seconds=0.5, send_seconds=SHORT, connections=30
)
GET = b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
CHUNKED = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def post(model: bytes = b"double", body: bytes = JSON, length: int | None = None, headers: bytes = b"") -> bytes:
    head = b"POST /v2/models/%s/infer HTTP/1.1\r\nhost: a\r\n%scontent-length: %d\r\n\r\n"
    return head % (model, headers, len(body) if length is None else length) + body


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Fronted]:
    """With little patience."""
    with serving("http", QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[Fronted]:
    with serving("http", Limits(header_bytes=4096, json_bytes=10_000)) as running:
        yield running


def assert_serves(hasty: Fronted) -> None:
    with hasty.connect() as sock:
        sock.sendall(post())
        assert read_answer(sock).status == 200


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def drip(hasty: Fronted, start: bytes, piece: bytes) -> bytes:
    """Send the piece over and over, a little at a time; what was answered when the server had enough."""
    answered = b""
    end = time.monotonic() + SECONDS
    with hasty.connect() as sock:
        sock.sendall(start)
        sock.settimeout(SHORT / 10)
        while time.monotonic() < end:
            try:
                sock.sendall(piece)
                received = sock.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                return answered
            if not received:
                return answered
            answered += received
    raise AssertionError("the server lets it go on")


SLOW = [
    (b"GET /v2", b"x", [408]),
    (b"GET /v2 HTTP/1.1\r\nhost: a\r\n", b"a: b\r\n", [408]),
    (b"GET /v2 HTTP/1.1\r\nhost: ", b"a", [408]),
    (post(body=b"", length=1000), b" ", [408]),
    (post(body=b"", length=1000, headers=b"expect: 100-continue\r\n"), b" ", [100, 408]),
    (CHUNKED, b"1\r\n \r\n", [408]),
    # Between requests: what is answered is not held against it, that it never becomes a request is.
    (b"", b"\r\n", []),
    # Answered before the body has come, which then takes for ever.
    (b"POST /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b" ", [404]),
    (b"GET /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b" ", [200]),
]


def test_slow_senders(hasty: Fronted) -> None:
    with ThreadPoolExecutor(len(SLOW)) as pool:
        answers = [(pool.submit(drip, hasty, start, piece), expected) for start, piece, expected in SLOW]
        for answer, expected in answers:
            assert statuses(answer.result()) == expected
    hasty.wait_free()
    assert_serves(hasty)


def test_idle_connections(hasty: Fronted) -> None:
    """A connection that works is not idle, though it takes longer than any of the limits."""
    with hasty.connect() as works:
        works.sendall(post(b"slow"))
        with hasty.connect() as sock:
            assert read_to_end(sock) == b""
        with hasty.connect() as sock:
            sock.sendall(GET)
            assert statuses(read_to_end(sock)) == [200]
        hasty.let_go()
        assert read_answer(works).status == 200
    hasty.reset()


def test_who_does_not_read_the_answer(hasty: Fronted) -> None:
    """Many, each of half a megabyte: more than the system holds for a connection."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", hasty.port))
        sock.settimeout(SHORT * 3)
        with contextlib.suppress(OSError):
            for _ in range(40):
                sock.sendall(echo(1 << 17))
        hasty.wait_free()
    assert_serves(hasty)


ENDLESS = [b"GET /", b"GET /v2 HTTP/1.1\r\nhost: ", b"GET /v2 HTTP/1.1\r\n", CHUNKED + b"0\r\nhost: "]


@pytest.mark.parametrize("start", [*ENDLESS, CHUNKED + b"5;extension="])
def test_headers_that_are_too_long(patient: Fronted, start: bytes) -> None:
    for piece, end in ((b"a" * 1000, b""), (b"a" * 5000, b" HTTP/1.1\r\nhost: a\r\n\r\n"), (b"a: b\r\n" * 200, b"")):
        with patient.connect() as sock:
            num_sent, answered = 0, b""
            sock.sendall(start)
            sock.setblocking(False)
            until = time.monotonic() + SECONDS
            while not answered and time.monotonic() < until:
                try:
                    num_sent += sock.send(piece + end)
                    answered = sock.recv(1 << 16)
                except BlockingIOError:
                    continue
                except ConnectionError:
                    break
            if piece[1:2] == b"a" and not end:
                assert statuses(answered) == [431]
            assert answered.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
            assert num_sent < 8 << 20, "a header grew without bound"
    assert_serves(patient)


NONSENSE = [
    b"\0" * 100,
    b"nonsense\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /v2 HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /\xff HTTP/1.1\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"zz\r\n",
    CHUNKED + b"fffffffffffffffffff\r\n",
    b"GET /v2 HTTP/1.1\r\nhost: a\r\n bad: b\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nho\0st: a\r\n\r\n",
]


def test_nonsense(patient: Fronted) -> None:
    for sent in NONSENSE:
        with patient.connect() as sock:
            sock.sendall(sent)
            answer = read_answer(sock)
            assert (answer.status, list(orjson.loads(answer.body))) == (400, ["error"]), sent
            assert answer.headers["connection"] == "close"
            sock.sendall(b"a" * (4 << 20))
            assert sock.recv(1) == b"", "a reset, which would have taken back an answer that was not yet read"
    assert_serves(patient)


WEBSOCKET = GET[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
MESSAGES = {
    GET: 200,
    WEBSOCKET: 200,
    post(): 200,
    post(b"absent"): 404,
    chunked(JSON, 1): 200,
    chunked(JSON, 50, b"x-request-id: late\r\n"): 200,
    chunked(b"{}", 2): 400,
}


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from([*MESSAGES]), st.booleans()), max_size=6), st.sampled_from([1, 7, 64, 1 << 16])
)
def test_pipelined_requests_are_answered_in_order(patient: Fronted, drawn: list[tuple[bytes, bool]], step: int) -> None:
    """In pieces of any size; offers of another protocol are ignored, and trailers stay out of the headers."""
    sent = b"".join(
        message.replace(b"host: a\r\n", b"host: a\r\n" + OFFER, 1) if offers else message for message, offers in drawn
    )
    with patient.connect() as sock:
        for first in range(0, len(sent + LAST), step):
            sock.sendall((sent + LAST)[first : first + step])
        data = read_to_end(sock)
    assert statuses(data) == [*(MESSAGES[message] for message, _ in drawn), 404]
    assert b"x-request-id" not in data.lower()


def test_too_many_pipelined_requests_and_nonsense_behind_one(patient: Fronted) -> None:
    patient.reset()
    for behind, status in ((GET * (MAX_PIPELINED + 1), 503), (b"nonsense\r\n\r\n", 400)):
        with patient.connect() as sock:
            seen = len(patient.engine.seen)
            sock.sendall(post(b"slow"))
            patient.wait_until(lambda seen=seen: len(patient.engine.seen) > seen)
            sock.sendall(behind)
            assert read_answer(sock).status == status
        patient.wait_until(lambda: len(patient.engine.cancelled) == len(patient.engine.seen))
        assert_serves(patient)
        patient.reset()
