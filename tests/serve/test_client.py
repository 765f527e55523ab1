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
from hypothesis import given
from hypothesis import strategies as st

from bench.data import ROOT
from tests.serve.requests import plain_tensors
from tierstore.serve.client import Client
from tierstore.serve.messages import ServeError, Status

HEADER = "Inference-Header-Content-Length"
CODES = {"FP32": "f", "INT64": "q", "INT32": "i"}
INFER = "/v2/models/m/infer"


class Handler(BaseHTTPRequestHandler):
    """Keeps what it is asked, and answers as the server's ``replies`` say, or gives back each input as an output."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        server.seen.append((self.path, dict(self.headers), body))
        server.connections.add(self.client_address)
        if server.blocker is not None:
            assert server.blocker.wait(30)
        status, headers, reply = server.replies.get(self.path) or self.echo(body)
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(reply))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply)
        self.close_connection = server.closes

    do_GET = do_POST

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
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.replies: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.connections: set[Any] = set()
        self.faults: list[BaseException | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            self.faults.append(sys.exception())


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
    with Client(server.url, timeout=20) as made:  # closed first: the server ends only when its connections do
        yield made


def sent_tensors(body: bytes, headers: dict[str, str]) -> dict[str, tuple[str, list[int], list[Any]]]:
    at = int(headers[HEADER])
    tensors = {}
    for each in json.loads(body[:at])["inputs"]:
        size, code = each["parameters"]["binary_data_size"], CODES[each["datatype"]]
        numbers = list(struct.unpack(f"<{size // struct.calcsize(code)}{code}", body[at : at + size]))
        tensors[each["name"]] = each["datatype"], each["shape"], numbers
        at += size
    assert at == len(body)
    return tensors


def reply_with(name: str, datatype: str, shape: list[int], *numbers: Any) -> tuple[int, dict[str, str], bytes]:
    data = struct.pack(f"<{len(numbers)}{CODES[datatype]}", *numbers)
    output = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"model_version": "9", "outputs": [output]}).encode()
    return 200, {HEADER: str(len(header))}, header + data


@given(plain_tensors(), st.sampled_from(["as it is", "big-endian", "transposed", "torch"]))
def test_tensors_go_and_come_in_binary(drawn: dict[str, tuple[str, np.ndarray]], kind: str) -> None:
    inputs: dict[str, Any] = {name: array for name, (datatype, array) in drawn.items() if datatype != "BYTES"}
    if kind == "big-endian":
        inputs = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in inputs.items()}
    elif kind == "transposed":
        inputs = {name: array.T for name, array in inputs.items()}
    elif kind == "torch":
        inputs = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
        inputs = {name: each.requires_grad_() if each.is_floating_point() else each for name, each in inputs.items()}
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with Client(server.url, timeout=20) as client:
            answer = client.infer("m", inputs, version="7", timeout=2.5)
        server.shutdown()
        thread.join()
    ((path, headers, body),) = server.seen
    assert (path, answer.version) == ("/v2/models/m/versions/7/infer", "7")
    assert json.loads(body[: int(headers[HEADER])])["parameters"] == {"binary_data_output": True, "timeout": 2_500_000}
    sent = sent_tensors(body, headers)
    for name, tensor in inputs.items():
        expected = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else tensor
        assert sent[name] == (drawn[name][0], list(expected.shape), expected.reshape(-1).tolist())
        assert answer.outputs[name].tolist() == expected.tolist()
        assert not answer.outputs[name].flags.writeable


def test_the_models_of_the_server(server: Server, client: Client) -> None:
    server.replies |= {
        "/v2/models/ranking/infer": reply_with("probabilities", "FP32", [2], 0.5, 0.25),
        "/v2/models/pooled.item/infer": reply_with("embeddings", "FP32", [1, 2], 3.0, 4.0),
        "/v2/models/rows.item%2Fa/infer": reply_with("rows", "FP32", [2, 1], 5.0, 6.0),
    }
    assert client.rank([[1], [2]], torch.tensor([4, 5, 6]), [[1, 0], [2, 0]]).tolist() == [0.5, 0.25]
    assert client.pooled([4, 5], [2], [1, 0.5], table="item").tolist() == [[3.0, 4.0]]
    assert client.rows([4, 5], table="item/a").tolist() == [[5.0], [6.0]]
    client.rank(torch.tensor([[1.5]], dtype=torch.bfloat16), np.array([2**40], np.uint64), [[2**31 - 1, -(2**31)]])
    ranked, pooled, rows, wide = (sent_tensors(body, headers) for _, headers, body in server.seen)
    assert ranked["dense"] == ("FP32", [2, 1], [1, 2])
    assert (ranked["values"], ranked["lengths"]) == (("INT64", [3], [4, 5, 6]), ("INT32", [2, 2], [1, 0, 2, 0]))
    ids = {"ids": ("INT64", [2], [4, 5])}
    assert pooled == ids | {"lengths": ("INT32", [1], [2]), "weights": ("FP32", [2], [1, 0.5])}
    assert rows == ids
    assert (wide["dense"], wide["values"]) == (("FP32", [1, 1], [1.5]), ("INT64", [1], [2**40]))
    assert wide["lengths"] == ("INT32", [1, 2], [2**31 - 1, -(2**31)])


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
    assert {headers["Authorization"] for _, headers, _ in server.seen} == {"Bearer t0ken"}
    assert len(server.connections) == 1, "it is kept"


def test_the_servers_errors(server: Server, client: Client) -> None:
    odd = {405: Status.INVALID, 502: Status.INTERNAL, 503: Status.UNAVAILABLE}
    usual = {each.http: each for each in Status if each.http not in (408, 431, 503)}
    for code, status in (usual | odd).items():
        server.replies[INFER] = code, {}, b'{"error": "input \'x\': no"}'
        server.replies["/v2/models/m"] = code, {}, b"<html>"
        with pytest.raises(ServeError, match=r"^input 'x': no \(HTTP ") as caught:
            client.infer("m", {})
        assert caught.value.status is status
        with pytest.raises(ServeError, match=rf"^<html> \(HTTP {code}\)$"):
            client.metadata("m")


def test_what_does_not_answer_is_told_with_its_address(server: Server, client: Client) -> None:
    server.blocker = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=client.address):
            client.infer("m", {}, timeout=0.05)
    finally:
        server.blocker.set()
    server.blocker = None
    one = {"x": np.ones(1, np.float32)}
    assert client.infer("m", one).outputs["x"].tolist() == [1.0], "no late answer is taken for this one"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def speak() -> None:
            listener.settimeout(30)
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        done = pool.submit(speak)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(f"http://{address}", timeout=20) as other, pytest.raises(ConnectionError, match=address):
            other.ready()
        done.result(30)
    with Client(f"http://{address}") as other, pytest.raises(ConnectionError, match=address):
        other.ready()


def test_connections_that_were_closed_are_replaced_and_threads_share_a_client(server: Server, client: Client) -> None:
    def call(number: int) -> int:
        return int(client.infer("m", {"x": np.full(1000, number)}).outputs["x"][-1])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(100))) == list(range(100))
    assert len(server.connections) <= 4
    server.closes = True
    before = len(server.connections)
    assert [call(number) for number in range(6)] == list(range(6))
    assert len(server.connections) > before + 1


GOOD = reply_with("y", "FP32", [2], 1.0, 2.0)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"not json"),
        ({}, b"[]"),
        ({}, b'{"outputs": [3]}'),
        ({}, b'{"outputs": [{"name": "y", "datatype": "FP31", "shape": [1], "data": [1]}]}'),
        ({}, b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [3], "data": [1]}]}'),
        *(({HEADER: length}, GOOD[2]) for length in ("9999", "-1", "x")),
        (GOOD[1], GOOD[2][:-1]),
        (GOOD[1], GOOD[2] + b"more"),
        (GOOD[1], GOOD[2].replace(b'"binary_data_size": 8', b'"binary_data_size":-8')),
        (GOOD[1], GOOD[2].replace(b"[2]", b"[4]")),
    ],
)
def test_an_answer_that_is_none(server: Server, client: Client, headers: dict[str, str], body: bytes) -> None:
    server.replies[INFER] = 200, headers, body
    with pytest.raises(ConnectionError, match=client.address):
        client.infer("m", {})
    server.replies |= {"/v2/models/rows.item/infer": GOOD, "/v2/models/m": (200, {}, b"<html>")}
    with pytest.raises(ConnectionError, match="'rows'"):
        client.rows([1], table="item")
    with pytest.raises(ConnectionError, match="JSON"):
        client.metadata("m")


NOT_IDS: list[Any] = [[1.0], [float("nan")], ["1", 2**70], [True], [2**70], torch.ones(1), np.empty(0)]
NOT_IDS += [torch.ones(1, dtype=torch.bfloat16), np.array([2**63], np.uint64)]


def test_wrong_arguments_are_named_and_nothing_is_sent(server: Server, client: Client) -> None:
    for wrong in ({"url": "localhost:8000"}, {"url": "ftp://localhost"}, {"url": "http://localhost:8000/v2"}):
        with pytest.raises(ValueError, match="http://host:port"):
            Client(**wrong)
    with pytest.raises(ValueError, match="timeout=0"):
        Client("http://localhost", timeout=0)
    for array in (np.zeros(1, np.complex128), np.array(["a", 1], object)):
        with pytest.raises(ValueError, match="input 'x': dtype"):
            client.infer("m", {"x": array})
    with pytest.raises(ValueError, match="timeout=-1"):
        client.infer("m", {}, timeout=-1)
    for ids in NOT_IDS:
        calls = {"ids": lambda ids=ids: client.rows(ids, table="item")}
        calls["values"] = lambda ids=ids: client.rank([[1.0]], ids, [[1]])
        calls["lengths"] = lambda ids=ids: client.pooled([1], ids, table="item")
        for name, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=rf"^{name} must .*int"):
                call()
    with pytest.raises((TypeError, ValueError), match=r"^lengths must .*int32"):
        client.pooled([1], np.array([2**31]), table="item")
    with pytest.raises(TypeError, match=r"^dense must be real numbers"):
        client.rank([["1"]], [1], [[1]])
    assert not server.seen


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
body, headers = encode_request({"x": np.zeros(2, np.float32)}, {})
(length,) = [value for name, value in headers.items() if name.startswith("Inference")]
print(decode_answer(body.replace(b'"inputs"', b'"outputs"'), str(int(length) + 1)).outputs["x"].tolist())
"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [re.split("[>=;]", each)[0] for each in project["optional-dependencies"]["serve"]]
    names = [{"grpcio": "grpc", "protobuf": "google"}.get(each, each.replace("-", "_")) for each in extras]
    assert {"grpc", "orjson", "starlette", "prometheus_client"} <= set(names)
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[0.0, 0.0]\n", "")
