"""The client against a server that speaks the protocol by other means: the standard library's, and struct."""

import json
import re
import socket
import struct
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from bench.data import ROOT
from tierstore.serve.client import Client
from tierstore.serve.messages import ServeError, Status

HEADER = "Inference-Header-Content-Length"
CODES = {"FP32": "f", "INT64": "q", "INT32": "i"}


class Handler(BaseHTTPRequestHandler):
    """Keeps what it is asked, and answers as the server's ``replies`` say, or gives back each input as an output."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Server = self.server
        server.seen.append((self.command, self.path, dict(self.headers), body))
        server.connections.add(self.client_address)
        if server.blocker is not None:
            assert server.blocker.wait(30)
        status, headers, reply = server.replies.get(self.path) or self.echo(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)
        self.close_connection = server.closes

    def echo(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        length = int(self.headers[HEADER])
        request = json.loads(body[:length])
        assert sum(each["parameters"]["binary_data_size"] for each in request["inputs"]) == len(body) - length
        reply = json.dumps({"model_name": "m", "model_version": "7", "outputs": request["inputs"]}).encode()
        return 200, {HEADER: str(len(reply))}, reply + body[length:]


class Server(ThreadingHTTPServer):
    daemon_threads = False
    closes = False
    blocker: threading.Event | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.replies: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.connections: set[Any] = set()
        self.faults: list[BaseException | None] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            self.faults.append(sys.exception())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join(30)
        assert not thread.is_alive()
    assert not served.faults


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    # The server ends only when its connections do, so this is closed first.
    with Client(server.url, timeout=20) as made:
        yield made


def sent_tensors(body: bytes, headers: dict[str, str]) -> dict[str, tuple[str, list[int], tuple[Any, ...]]]:
    at = int(headers[HEADER])
    tensors = {}
    for each in json.loads(body[:at])["inputs"]:
        size = each["parameters"]["binary_data_size"]
        code = CODES[each["datatype"]]
        numbers = struct.unpack(f"<{size // struct.calcsize(code)}{code}", body[at : at + size])
        tensors[each["name"]] = each["datatype"], each["shape"], numbers
        at += size
    assert at == len(body)
    return tensors


def reply_with(name: str, datatype: str, shape: list[int], *numbers: Any) -> tuple[int, dict[str, str], bytes]:
    data = struct.pack(f"<{len(numbers)}{CODES[datatype]}", *numbers)
    output = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"model_version": "9", "outputs": [output]}).encode()
    return 200, {HEADER: str(len(header))}, header + data


def test_tensors_go_and_come_in_binary(server: Server, client: Client) -> None:
    inputs = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "b": np.array([1, -2], ">i8"),
        "c": torch.tensor([[1.5], [-2.0]], requires_grad=True),
        "d": np.zeros((0, 4), np.int32),
        "e": np.array(7, np.int64),
    }
    answer = client.infer("m", inputs, version="7", timeout=2.5)
    assert answer.version == "7"
    ((_, path, headers, body),) = server.seen
    assert path == "/v2/models/m/versions/7/infer"
    assert sent_tensors(body, headers) == {
        "a": ("FP32", [3, 2], (0, 3, 1, 4, 2, 5)),
        "b": ("INT64", [2], (1, -2)),
        "c": ("FP32", [2, 1], (1.5, -2.0)),
        "d": ("INT32", [0, 4], ()),
        "e": ("INT64", [], (7,)),
    }
    assert json.loads(body[: int(headers[HEADER])])["parameters"] == {"binary_data_output": True, "timeout": 2_500_000}
    for name, tensor in inputs.items():
        expected = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
        np.testing.assert_array_equal(answer.outputs[name], expected, strict=name != "b")
        assert not answer.outputs[name].flags.writeable


def test_the_models_of_the_server(server: Server, client: Client) -> None:
    server.replies |= {
        "/v2/models/ranking/infer": reply_with("probabilities", "FP32", [2], 0.5, 0.25),
        "/v2/models/pooled.item/infer": reply_with("embeddings", "FP32", [1, 2], 3.0, 4.0),
        "/v2/models/rows.item%2Fa/infer": reply_with("rows", "FP32", [2, 1], 5.0, 6.0),
    }
    assert client.rank([[1], [2]], torch.tensor([4, 5, 6]), [[1, 0], [2, 0]]).tolist() == [0.5, 0.25]
    assert client.pooled([4, 5], [2], table="item").tolist() == [[3.0, 4.0]]
    assert client.pooled([4, 5], [2], [1, 0.5], table="item").tolist() == [[3.0, 4.0]]
    assert client.rows([4, 5], table="item/a").tolist() == [[5.0], [6.0]]
    sent = [sent_tensors(body, headers) for _, _, headers, body in server.seen]
    assert sent == [
        {
            "dense": ("FP32", [2, 1], (1.0, 2.0)),
            "values": ("INT64", [3], (4, 5, 6)),
            "lengths": ("INT32", [2, 2], (1, 0, 2, 0)),
        },
        {"ids": ("INT64", [2], (4, 5)), "lengths": ("INT32", [1], (2,))},
        {"ids": ("INT64", [2], (4, 5)), "lengths": ("INT32", [1], (2,)), "weights": ("FP32", [2], (1.0, 0.5))},
        {"ids": ("INT64", [2], (4, 5))},
    ]


def test_what_the_server_says_of_itself(server: Server) -> None:
    server.replies |= {
        "/v2/health/ready": (200, {}, b"{}"),
        "/v2/repository/index": (200, {}, b'[{"name": "ranking"}, {"name": "rows"}]'),
        "/v2/models/rows/versions/3": (200, {}, b'{"name": "rows", "versions": ["3"]}'),
    }
    with Client(server.url + "/", token="t0ken") as client:
        assert client.ready() is True
        assert client.models() == ["ranking", "rows"]
        assert client.metadata("rows", version="3") == {"name": "rows", "versions": ["3"]}
        server.replies["/v2/health/ready"] = 503, {}, b"{}"
        assert client.ready() is False
    assert {headers["Authorization"] for _, _, headers, _ in server.seen} == {"Bearer t0ken"}
    assert len(server.connections) == 1, "it is kept"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (400, Status.INVALID),
        (401, Status.UNAUTHENTICATED),
        (404, Status.NOT_FOUND),
        (405, Status.INVALID),
        (413, Status.TOO_LARGE),
        (500, Status.INTERNAL),
        (502, Status.INTERNAL),
        (503, Status.UNAVAILABLE),
        (504, Status.DEADLINE),
    ],
)
def test_the_servers_errors(server: Server, client: Client, code: int, status: Status) -> None:
    server.replies["/v2/models/m/infer"] = code, {}, b'{"error": "input \'x\': no"}'
    server.replies["/v2/models/m"] = code, {}, b"<html>"
    with pytest.raises(ServeError, match=r"^input 'x': no \(HTTP ") as caught:
        client.infer("m", {})
    assert caught.value.status is status
    with pytest.raises(ServeError, match=rf"^<html> \(HTTP {code}\)$"):
        client.metadata("m")


def test_no_server_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(ConnectionError, match=f"127.0.0.1:{port}: "):
        client.ready()


def test_a_server_that_does_not_answer_is_told_with_its_address(server: Server, client: Client) -> None:
    server.blocker = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=f"{client.address}: no answer within 0.05 s"):
            client.infer("m", {}, timeout=0.05)
    finally:
        server.blocker.set()
    server.blocker = None
    assert client.infer("m", {"x": np.ones(1, np.float32)}).outputs["x"].tolist() == [1.0], (
        "no late answer is taken for this one"
    )


def test_a_connection_that_was_closed_while_idle_is_replaced(server: Server, client: Client) -> None:
    server.closes = True
    for number in range(3):
        assert client.infer("m", {"x": np.array([number])}).outputs["x"].tolist() == [number]
    assert len(server.seen) == len(server.connections) == 3


def test_what_is_no_http_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def speak() -> None:
            listener.settimeout(30)
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        done = pool.submit(speak)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(f"http://{address}", timeout=20) as client, pytest.raises(ConnectionError, match=address):
            client.ready()
        done.result(30)


GOOD = reply_with("y", "FP32", [2], 1.0, 2.0)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"not json"),
        ({}, b"[]"),
        ({}, b'{"outputs": [3]}'),
        ({}, b'{"outputs": [{"name": "y", "datatype": "FP31", "shape": [1], "data": [1]}]}'),
        ({}, b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [3], "data": [1]}]}'),
        ({HEADER: "9999"}, GOOD[2]),
        ({HEADER: "-1"}, GOOD[2]),
        ({HEADER: "x"}, GOOD[2]),
        (GOOD[1], GOOD[2][:-1]),
        (GOOD[1], GOOD[2] + b"more"),
        (GOOD[1], GOOD[2].replace(b'"binary_data_size": 8', b'"binary_data_size":-8')),
        (GOOD[1], GOOD[2].replace(b"[2]", b"[4]")),
    ],
)
def test_an_answer_that_is_none(server: Server, client: Client, headers: dict[str, str], body: bytes) -> None:
    server.replies["/v2/models/m/infer"] = 200, headers, body
    with pytest.raises(ConnectionError, match=f"{client.address}: not an answer of the protocol"):
        client.infer("m", {})


def test_an_answer_without_the_output_or_without_json(server: Server, client: Client) -> None:
    server.replies["/v2/models/rows.item/infer"] = GOOD
    with pytest.raises(ConnectionError, match=r"'rows.item' answered without 'rows'"):
        client.rows([1], table="item")
    server.replies["/v2/models/m"] = 200, {}, b"<html>"
    with pytest.raises(ConnectionError, match="did not answer in JSON"):
        client.metadata("m")


def test_threads_share_a_client(server: Server, client: Client) -> None:
    def call(number: int) -> int:
        return client.infer("m", {"x": np.full(1000, number)}).outputs["x"][-1].item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(100))) == list(range(100))
    assert len(server.connections) <= 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": "localhost:8000"}, "expected http://host:port"),
        ({"url": "ftp://localhost"}, "expected http://host:port"),
        ({"url": "http://localhost:8000/v2"}, "expected http://host:port"),
        ({"url": "http://localhost", "timeout": 0}, "timeout=0: expected seconds"),
    ],
)
def test_a_bad_argument_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Client(**arguments)


def test_what_the_protocol_cannot_carry_is_named(client: Client) -> None:
    with pytest.raises(ValueError, match=r"input 'x': dtype complex128 is none of int32, int64, float32"):
        client.infer("m", {"x": np.zeros(1, np.complex128)})
    with pytest.raises(ValueError, match=r"input 'x': dtype object"):
        client.infer("m", {"x": np.array(["a", 1], object)})
    with pytest.raises(ValueError, match="timeout=-1: expected seconds"):
        client.infer("m", {}, timeout=-1)


def test_the_client_needs_nothing_of_the_server() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import numpy as np
from tierstore.serve.client import decode_answer, encode_request
from tierstore.serve.client import Client
body, headers = encode_request({"x": np.zeros(2, np.float32)}, {})
(length,) = [value for name, value in headers.items() if name.startswith("Inference")]
print(decode_answer(body.replace(b'"inputs"', b'"outputs"'), str(int(length) + 1)).outputs["x"].tolist())
"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"]["serve"]
    extras = [re.split("[>=;]", each)[0] for each in needed]
    names = [{"grpcio": "grpc", "protobuf": "google"}.get(each, each.replace("-", "_")) for each in extras]
    assert {"grpc", "orjson", "starlette", "prometheus_client"} <= set(names)
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[0.0, 0.0]\n", "")


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1.0], TypeError),
        ([float("nan")], TypeError),
        (["1", 2**70], TypeError),
        ([True], TypeError),
        ([2**70], TypeError),
        (torch.ones(1), TypeError),
        (torch.ones(1, dtype=torch.bfloat16), TypeError),
        (np.empty(0), TypeError),
        (np.array([2**63], np.uint64), ValueError),
    ],
)
def test_ids_are_integers_that_fit_and_no_others_are_sent(
    server: Server, client: Client, ids: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^ids must .*int64"):
        client.rows(ids, table="item")
    with pytest.raises(error, match=r"^values must .*int64"):
        client.rank([[1.0]], ids, [[1]])
    for lengths in (ids, np.array([2**31])):
        with pytest.raises((TypeError, ValueError), match=r"^lengths must .*int32"):
            client.pooled([1], lengths, table="item")
    with pytest.raises(TypeError, match=r"^dense must be real numbers"):
        client.rank([["1"]], [1], [[1]])
    assert not server.seen


def test_numbers_that_fit_are_sent_as_they_are(server: Server, client: Client) -> None:
    server.replies["/v2/models/ranking/infer"] = reply_with("probabilities", "FP32", [0])
    dense = torch.tensor([[1.5]], dtype=torch.bfloat16)
    client.rank(dense, np.array([2**40], np.uint64), np.array([[2**31 - 1, -(2**31)]]))
    client.rank(np.zeros((0, 1)), [], [])
    first, second = (sent_tensors(body, headers) for _, _, headers, body in server.seen)
    assert first["dense"] == ("FP32", [1, 1], (1.5,))
    assert first["values"] == ("INT64", [1], (2**40,))
    assert first["lengths"] == ("INT32", [1, 2], (2**31 - 1, -(2**31)))
    assert (second["values"], second["lengths"]) == (("INT64", [0], ()), ("INT32", [0], ()))
