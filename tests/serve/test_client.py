"""The client against the server's REST front, and against answers that are none."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.fakes import VERSION
from tests.serve.fronts import Fronted, serving
from tests.serve.requests import plain_tensors
from tierstore.serve import client as clients
from tierstore.serve.client import Answer, Client, decode_answer
from tierstore.serve.limits import Limits


@pytest.fixture(scope="module")
def running() -> Iterator[Fronted]:
    with serving("http") as made:
        yield made


@pytest.fixture
def served(running: Fronted) -> Fronted:
    return running.reset()


@pytest.fixture
def client(served: Fronted) -> Iterator[Client]:
    with Client(f"http://{served.address}", timeout=20) as made:
        yield made


@given(plain_tensors(), st.sampled_from(["as it is", "big-endian", "transposed", "torch"]))
def test_tensors_go_and_come_as_they_are(running: Fronted, drawn: dict[str, tuple[str, np.ndarray]], kind: str) -> None:
    inputs: dict[str, Any] = {name: array for name, (datatype, array) in drawn.items() if datatype != "BYTES"}
    if kind == "big-endian":
        inputs = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in inputs.items()}
    elif kind == "transposed":
        inputs = {name: array.T for name, array in inputs.items()}
    elif kind == "torch":
        inputs = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
        inputs = {name: each.requires_grad_() if each.is_floating_point() else each for name, each in inputs.items()}
    before = time.monotonic()
    with Client(f"http://{running.address}", timeout=20) as client:
        answer = client.infer("echo", inputs, version=VERSION, timeout=2.5)
    request = running.engine.seen[-1]
    assert (request.version, answer.version, list(request.inputs)) == (VERSION, VERSION, list(inputs))
    assert before + 2.5 <= request.deadline <= time.monotonic() + 2.5
    for name, tensor in inputs.items():
        expected = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else tensor
        found = request.inputs[name]
        assert (found.datatype, found.data.shape) == (drawn[name][0], expected.shape)
        assert found.data.tolist() == answer.outputs[name].tolist() == expected.tolist()
        assert not answer.outputs[name].flags.writeable


def test_the_models_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def infer(_: Client, model: str, inputs: dict[str, Any]) -> Answer:
        seen[model] = {name: (str(each.dtype), each.tolist()) for name, each in inputs.items()}
        return Answer({name: np.ones(1) for name in ("probabilities", "embeddings", "rows")}, "1")

    monkeypatch.setattr(Client, "infer", infer)
    with Client("http://localhost:1") as client:
        assert client.rank([[1], [2]], torch.tensor([4, 5, 6]), [[1, 0], [2, 0]]).tolist() == [1]
        client.pooled([4, 5], [2], [1, 0.5], table="item")
        client.rows([4, 5], table="item/a")
        lengths = {"lengths": ("int32", [[1, 0], [2, 0]])}
        assert seen["ranking"] == {"dense": ("float32", [[1], [2]]), "values": ("int64", [4, 5, 6])} | lengths
        ids = {"ids": ("int64", [4, 5])}
        assert seen["pooled.item"] == ids | {"lengths": ("int32", [2]), "weights": ("float32", [1, 0.5])}
        assert seen["rows.item/a"] == ids
        client.rank(torch.tensor([[1.5]], dtype=torch.bfloat16), np.array([2**40], np.uint64), [[2**31 - 1]])
        assert seen["ranking"]["dense"] == ("float32", [[1.5]])
        assert seen["ranking"]["values"] == ("int64", [2**40])
        assert seen["ranking"]["lengths"] == ("int32", [[2**31 - 1]])


def test_what_the_server_says_of_itself() -> None:
    with serving("http", token="t0ken") as served, Client(f"http://{served.address}/", token="t0ken") as client:
        assert client.ready() is True
        assert "echo" in client.models()
        assert client.metadata("echo", version=VERSION)["versions"] == [VERSION]
        served.engine.is_ready = False
        assert client.ready() is False
        assert served.server.num_connections == 1, "it is kept"


def test_what_does_not_answer_is_told_with_its_address(served: Fronted, client: Client) -> None:
    one = {"x": np.ones(1, np.float32)}
    with pytest.raises(TimeoutError, match=client.address):
        client.infer("slow", one, timeout=0.05)
    assert client.infer("echo", {"x": np.zeros(1, np.float32)}).outputs["x"] == 0, "no late answer is taken for this"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def speak() -> None:
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


def test_connections_that_were_closed_are_replaced_and_threads_share_a_client() -> None:
    def call(number: int) -> int:
        return int(client.infer("echo", {"x": np.full(1000, number)}).outputs["x"][-1])

    with serving("http", Limits(idle_seconds=0.1)) as served, Client(f"http://{served.address}") as client:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(call, range(100))) == list(range(100))
        assert len(client._idle) <= 4
        served.wait_until(lambda: served.server.num_connections == 0)
        assert call(7) == 7


def answer_of(shape: list[int], data: bytes) -> tuple[bytes, str]:
    """A body with output "y" of FP32, and the length of its JSON."""
    output = {"name": "y", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"model_version": "9", "outputs": [output]}).encode()
    return head + data, str(len(head))


GOOD, LENGTH = answer_of([2], struct.pack("<2f", 1, 2))


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b"not json", None),
        (b"[]", None),
        (b'{"outputs": [3]}', None),
        (b'{"outputs": [{"name": "y", "datatype": "FP31", "shape": [1], "data": [1]}]}', None),
        (b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [3], "data": [1]}]}', None),
        *((GOOD, length) for length in ("9999", "-1", "x")),
        (GOOD[:-1], LENGTH),
        (GOOD + b"more", LENGTH),
        (GOOD.replace(b'"binary_data_size": 8', b'"binary_data_size":-8'), LENGTH),
        answer_of([4], bytes(8)),
    ],
)
def test_an_answer_that_is_none(body: bytes, length: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_answer(GOOD, LENGTH).outputs["y"].tolist() == [1, 2]
    with pytest.raises(ValueError):
        decode_answer(body, length)
    monkeypatch.setattr(Client, "_exchange", lambda *_: clients._Reply(200, length, body))
    with Client("http://localhost:1") as client:
        with pytest.raises(ConnectionError, match="localhost:1"):
            client.infer("m", {})
        monkeypatch.setattr(Client, "_exchange", lambda *_: clients._Reply(200, LENGTH, GOOD))
        with pytest.raises(ConnectionError, match="'rows'"):
            client.rows([1], table="item")
        with pytest.raises(ConnectionError, match="JSON"):
            client.metadata("m")


NOT_IDS: list[Any] = [[1.0], [float("nan")], ["1", 2**70], [True], [2**70], torch.ones(1), np.empty(0)]
NOT_IDS += [torch.ones(1, dtype=torch.bfloat16), np.array([2**63], np.uint64)]


def test_wrong_arguments_are_named_and_nothing_is_sent(served: Fronted, client: Client) -> None:
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
    assert not served.engine.seen
