"""Clients that are slow, greedy or speak nonsense: each is told or cut off, and nobody else notices."""

import contextlib
import socket
import time
from collections.abc import Iterator

import orjson
import pytest

from tests.serve.rest_server import SECONDS, RestServer, read_answer, read_to_end, serving
from tierstore.serve.limits import Limits
from tierstore.serve.messages import Status
from tierstore.serve.rest.protocol import MAX_PIPELINED

SHORT = 0.3
QUICK = Limits(
    body_bytes=1 << 20, header_bytes=4096, receive_seconds=SHORT, idle_seconds=0.5, send_seconds=SHORT, connections=8
)
GET = b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n"
BODY = orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]})


def post(model: bytes = b"double", body: bytes = BODY, length: int | None = None, headers: bytes = b"") -> bytes:
    head = b"POST /v2/models/%s/infer HTTP/1.1\r\nhost: a\r\n%scontent-length: %d\r\n\r\n"
    return head % (model, headers, len(body) if length is None else length) + body


@pytest.fixture(scope="module")
def server() -> Iterator[RestServer]:
    """With little patience."""
    with serving(limits=QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[RestServer]:
    with serving(limits=Limits(header_bytes=4096, json_bytes=10_000)) as running:
        yield running


def assert_serves(server: RestServer) -> None:
    with server.connect() as sock:
        sock.sendall(post())
        assert read_answer(sock).status == 200


def drip(sock: socket.socket, piece: bytes) -> bytes:
    """Send the piece over and over, a little at a time; what was answered when the server had enough."""
    sock.settimeout(SHORT / 10)
    answered = b""
    end = time.monotonic() + SECONDS
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


@pytest.mark.parametrize(
    ("start", "piece", "status"),
    [
        (b"GET /v2", b"x", b"408"),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\n", b"a: b\r\n", b"408"),
        (b"GET /v2 HTTP/1.1\r\nhost: ", b"a", b"408"),
        (post(body=b"", length=1000), b" ", b"408"),
        (post(body=b"", length=1000, headers=b"expect: 100-continue\r\n"), b" ", b"408"),
        (b"POST /v2/models/double/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", b"408"),
        # Between requests: what is answered is not held against it, that it never becomes a request is.
        (b"", b"\r\n", b""),
        # Answered before the body has come, which then takes for ever.
        (b"POST /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b" ", b"404"),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n", b" ", b"200"),
    ],
)
def test_slow_senders(server: RestServer, start: bytes, piece: bytes, status: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(start)
        answered = drip(sock, piece)
    if status:
        assert answered.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 " + status)
    else:
        assert answered == b""
    if status == b"408":
        assert b'"error":"the request took longer than 0.3 seconds"' in answered
    server.wait_until(lambda: server.app.front.requests.held == 0)
    assert_serves(server)


def test_idle_connections(server: RestServer) -> None:
    with server.connect() as sock:
        assert read_to_end(sock) == b""
    with server.connect() as sock:
        sock.sendall(GET)
        assert read_answer(sock).status == 200
        assert read_to_end(sock) == b""


def test_a_connection_that_works_is_not_idle(server: RestServer) -> None:
    with server.connect() as sock:
        sock.sendall(post(b"slow"))
        # Longer than any of the limits, seen by another connection's being closed for its idleness, twice.
        for _ in range(2):
            with server.connect() as idle:
                assert read_to_end(idle) == b""
        server.loop.call_soon_threadsafe(server.engine.let_go.set)
        assert read_answer(sock).status == 200
        server.loop.call_soon_threadsafe(server.engine.let_go.clear)


def test_who_does_not_read_the_answer(server: RestServer) -> None:
    size = 1 << 19
    body = orjson.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "INT32", "shape": [size // 4], "parameters": {"binary_data_size": size}},
            ],
            "parameters": {"binary_data_output": True},
        }
    )
    headers = b"inference-header-content-length: %d\r\n" % len(body)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(SECONDS)
        sock.connect(("127.0.0.1", server.port))
        # Many of them, each answered with half a megabyte: more than the system holds for a connection.
        sock.settimeout(SHORT * 3)
        try:
            for _ in range(40):
                sock.sendall(post(b"echo", body + bytes(size), headers=headers))
        except OSError:
            pass
        server.wait_until(lambda: server.server.num_connections == 0)
    server.wait_until(lambda: server.app.front.requests.held == 0)
    assert_serves(server)


def test_answers_that_nobody_reads_are_bounded() -> None:
    """Who asks for more of them than there is room for is told; who asks for little is answered all the same."""
    size = 4 << 20
    shape = {"name": "x", "datatype": "INT32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    body = orjson.dumps({"inputs": [shape], "parameters": {"binary_data_output": True}})
    headers = b"inference-header-content-length: %d\r\n" % len(body)
    large = post(b"echo", body + bytes(size), headers=headers)
    with serving(limits=Limits(responses_bytes=9 << 20)) as server, contextlib.ExitStack() as opened:
        for count in (1, 2):
            sock = opened.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(large)
            server.wait_until(lambda count=count: server.app.front.unsent.held >= count * size)
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sock:
            sock.sendall(large)
            answer = read_answer(sock)
            assert (answer.status, b"yet to accept" in answer.body) == (503, True)
        assert server.engine.refused[0][1].status is Status.OVERLOADED
        assert_serves(server)
        opened.close()
        server.wait_until(lambda: server.app.front.unsent.held == 0)


def test_too_many_connections() -> None:
    with serving(limits=Limits(connections=4)) as server:
        open_ones = [server.connect() for _ in range(4)]
        server.wait_until(lambda: server.server.num_connections == 4)
        with server.connect() as refused:
            refused.sendall(GET)
            answer = read_answer(refused)
            assert answer.status == 503
            assert "4 connections are open" in orjson.loads(answer.body)["error"]
            assert read_to_end(refused) == b""
        assert server.refused[-1].status is Status.OVERLOADED
        for sock in open_ones:
            sock.sendall(GET)
            assert read_answer(sock).status == 200
            sock.close()
        server.wait_until(lambda: server.server.num_connections == 0)
        assert_serves(server)


def test_far_too_many_connections_are_cut() -> None:
    with serving(limits=Limits(connections=2)) as server:
        open_ones = [server.connect() for _ in range(20)]
        told = [read_to_end(sock).startswith(b"HTTP/1.1 503") for sock in open_ones[2:]]
        assert 2 <= sum(told) < 10
        for sock in open_ones[:2]:
            sock.sendall(GET)
            assert read_answer(sock).status == 200
        for sock in open_ones:
            sock.close()
        server.wait_until(lambda: server.server.num_connections == 0)
        assert_serves(server)


HEADERS_TOO_LONG = [
    b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v2?" + b"a=b&" * 1250 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nhost: " + b"a" * 5000 + b"\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 700 + b"\r\n",
    b"GET /v2 HTTP/1.1\r\n" + b"a" * 5000 + b": b\r\n\r\n",
]


@pytest.mark.parametrize("request_bytes", HEADERS_TOO_LONG)
def test_headers_that_are_too_long(patient: RestServer, request_bytes: bytes) -> None:
    with patient.connect() as sock:
        sock.sendall(request_bytes)
        answer = read_answer(sock)
        assert answer.status == 431
        assert "longer than 4096 bytes" in orjson.loads(answer.body)["error"]
    assert_serves(patient)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET /v2 HTTP/1.1\r\nhost: ",
        b"GET /v2 HTTP/1.1\r\n",
        b"POST /v2/models/double/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nhost: ",
        b"POST /v2/models/double/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5;extension=",
    ],
)
def test_headers_without_end(patient: RestServer, start: bytes) -> None:
    with patient.connect() as sock:
        sent = 0
        answered = b""
        sock.sendall(start)
        sock.setblocking(False)
        end = time.monotonic() + SECONDS
        while not answered and time.monotonic() < end:
            try:
                sent += sock.send(b"a" * 1000)
                answered = sock.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                break
        assert answered.startswith(b"HTTP/1.1 431")
        assert sent < 8 << 20, "a header grew without bound"
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
    b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    b"GET /v2 HTTP/1.1\r\nhost: a\r\n bad: b\r\n\r\n",
    b"GET /v2 HTTP/1.1\r\nho\0st: a\r\n\r\n",
]


@pytest.mark.parametrize("sent", NONSENSE)
def test_nonsense(patient: RestServer, sent: bytes) -> None:
    with patient.connect() as sock:
        sock.sendall(sent)
        answer = read_answer(sock)
        assert answer.status == 400
        assert list(orjson.loads(answer.body)) == ["error"]
        assert answer.headers["connection"] == "close"
        assert read_to_end(sock) == b""
    assert_serves(patient)


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_an_offer_of_another_protocol_is_ignored(patient: RestServer, step: int) -> None:
    """With a body, of either kind, and what comes after it on the connection."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    get = b"GET /v2 HTTP/1.1\r\nhost: a\r\n"
    chunked = (
        b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    websocket = get + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    sent = websocket
    for message in (get + b"\r\n", post(), chunked, GET):
        sent += message.replace(b"host: a\r\n", b"host: a\r\n" + offer, 1)
    sent += b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    with patient.connect() as sock:
        for first in range(0, len(sent), step):
            sock.sendall(sent[first : first + step])
        data = read_to_end(sock)
    assert [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 400, 200, 404]


def test_a_refused_client_that_sends_on_still_reads_why(patient: RestServer) -> None:
    with patient.connect() as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        assert read_answer(sock).status == 400
        sock.sendall(b"a" * (4 << 20))
        assert sock.recv(1) == b"", "a reset, which would have taken back an answer that was not yet read"


def test_pipelined_requests_are_answered_in_order(patient: RestServer) -> None:
    with patient.connect() as sock:
        sock.sendall(post() + GET + post(b"absent") + b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        data = read_to_end(sock)
    statuses = [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 404, 404]


def test_too_many_pipelined_requests(patient: RestServer) -> None:
    with patient.connect() as sock:
        sock.sendall(post(b"slow") + GET * (MAX_PIPELINED + 1))
        answer = read_answer(sock)
        assert answer.status == 503
        assert f"more than {MAX_PIPELINED} requests" in orjson.loads(answer.body)["error"]
    assert_serves(patient)


def test_nonsense_behind_a_request(patient: RestServer) -> None:
    cancelled, seen = len(patient.engine.cancelled), len(patient.engine.seen)
    with patient.connect() as sock:
        sock.sendall(post(b"slow"))
        patient.wait_until(lambda: len(patient.engine.seen) == seen + 1)
        sock.sendall(b"nonsense\r\n\r\n")
        assert read_answer(sock).status == 400
    patient.wait_until(lambda: len(patient.engine.cancelled) == cancelled + 1)


def test_slow_clients_do_not_starve_others() -> None:
    with serving(limits=Limits(connections=60)) as server:
        slow = [server.connect() for _ in range(50)]
        for number, sock in enumerate(slow):
            sock.sendall([b"GET /v2 HT", b"", post(length=1000), post(b"slow")][number % 4])
        server.wait_until(lambda: server.server.num_connections == 50)
        for _ in range(20):
            assert_serves(server)
        for sock in slow:
            sock.close()


def test_a_client_is_disconnected_amid_everything(patient: RestServer) -> None:
    whole = post(b"double", headers=b"x-request-id: a\r\n")
    for end in range(1, len(whole), 7):
        with patient.connect() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.sendall(whole[:end])
    patient.wait_until(lambda: patient.server.num_connections == 0 and patient.app.front.requests.held == 0)
    assert_serves(patient)


def test_chunked_trailers_stay_out_of_the_headers(patient: RestServer) -> None:
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-request-id: late\r\n\r\n" % (len(BODY), BODY)
    with patient.connect() as sock:
        sock.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: a\r\n" + chunked)
        answer = read_answer(sock)
    assert answer.status == 200
    assert "x-request-id" not in answer.headers


def test_honest_chunks_of_any_size_pass(patient: RestServer) -> None:
    for size in (1, 3, 50):
        chunks = b"".join(
            b"%x\r\n%s\r\n" % (len(piece), piece)
            for piece in (BODY[start : start + size] for start in range(0, len(BODY), size))
        )
        with patient.connect() as sock:
            sock.sendall(b"POST /v2/models/double/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            sock.sendall(chunks + b"0\r\n\r\n")
            assert read_answer(sock).status == 200
