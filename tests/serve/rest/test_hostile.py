"""Clients that are slow, greedy or speak nonsense: each is refused or cut off, and nobody else notices."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.fronts import SECONDS, Fronted, read_answer, read_to_end, serving
from tierstore.serve.limits import Limits
from tierstore.serve.rest.server import MAX_PIPELINED

SHORT = 0.3
QUICK = Limits(
    body_bytes=1 << 20, header_bytes=4096, receive_seconds=SHORT, idle_seconds=0.5, send_seconds=SHORT, connections=30
)
GET = b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
BODY = orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]})
CHUNKED = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


def post(model: bytes = b"double", body: bytes = BODY, length: int | None = None, headers: bytes = b"") -> bytes:
    head = b"POST /v2/models/%s/infer HTTP/1.1\r\nhost: a\r\n%scontent-length: %d\r\n\r\n"
    return head % (model, headers, len(body) if length is None else length) + body


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Fronted]:
    """With little patience."""
    with serving("http", QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[Fronted]:
    with serving("http", Limits(header_bytes=4096, json_bytes=10_000)) as running:
        yield running


def assert_serves(server: Fronted) -> None:
    with server.connect() as sock:
        sock.sendall(post())
        assert read_answer(sock).status == 200


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def drip(server: Fronted, start: bytes, piece: bytes) -> bytes:
    """Send the piece over and over, a little at a time; what was answered when the server had enough."""
    answered = b""
    end = time.monotonic() + SECONDS
    with server.connect() as sock:
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


def test_slow_senders(server: Fronted) -> None:
    with ThreadPoolExecutor(len(SLOW)) as pool:
        answers = [(pool.submit(drip, server, start, piece), expected) for start, piece, expected in SLOW]
        for answer, expected in answers:
            assert statuses(answer.result()) == expected
    server.wait_free()
    assert_serves(server)


def test_idle_connections(server: Fronted) -> None:
    """A connection that works is not idle, though it takes longer than any of the limits."""
    with server.connect() as works:
        works.sendall(post(b"slow"))
        with server.connect() as sock:
            assert read_to_end(sock) == b""
        with server.connect() as sock:
            sock.sendall(GET)
            assert statuses(read_to_end(sock)) == [200]
        server.let_go()
        assert read_answer(works).status == 200
    server.reset()


def test_who_does_not_read_the_answer(server: Fronted) -> None:
    """Many, each of half a megabyte: more than the system holds for a connection."""
    size = 1 << 19
    x = {"name": "x", "datatype": "INT32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    text = orjson.dumps({"inputs": [x], "parameters": {"binary_data_output": True}})
    large = post(b"echo", text + bytes(size), headers=b"inference-header-content-length: %d\r\n" % len(text))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(SHORT * 3)
        with contextlib.suppress(OSError):
            for _ in range(40):
                sock.sendall(large)
        server.wait_free()
    assert_serves(server)


ENDLESS = [b"GET /", b"GET /v2?a=", b"GET /v2 HTTP/1.1\r\nhost: ", b"GET /v2 HTTP/1.1\r\n", CHUNKED + b"0\r\nhost: "]


@pytest.mark.parametrize("start", [*ENDLESS, CHUNKED + b"5;extension="])
def test_headers_that_are_too_long(patient: Fronted, start: bytes) -> None:
    """Whether they end or not, and in fields of any length."""
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


@pytest.mark.parametrize("sent", NONSENSE)
def test_nonsense(patient: Fronted, sent: bytes) -> None:
    with patient.connect() as sock:
        sock.sendall(sent)
        answer = read_answer(sock)
        assert (answer.status, list(orjson.loads(answer.body))) == (400, ["error"])
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
    chunked(BODY, 1): 200,
    chunked(BODY, 50, b"x-request-id: late\r\n"): 200,
    chunked(b"{}", 2): 400,
}


@given(
    st.lists(st.tuples(st.sampled_from(list(MESSAGES)), st.booleans()), max_size=6),
    st.sampled_from([1, 7, 64, 1 << 16]),
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
