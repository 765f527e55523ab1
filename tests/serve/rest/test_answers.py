"""Large answers over REST: others are answered while one is written as JSON, and JSON has a bound."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.serve.fakes import Held
from tests.serve.rest_server import SECONDS, RestServer, serving
from tierstore.serve.limits import Limits
from tierstore.serve.messages import InferResponse, InferTensor, Status
from tierstore.serve.rest.infer_body import InferCall, write_infer
from tierstore.serve.tensors import PIECE_ELEMENTS

LARGE = 20_480
LIMIT = 24_576


def body_of(count: int, *, is_binary: bool) -> dict[str, Any]:
    """A request for ``count`` numbers, which go as binary data and come as asked."""
    x = {"name": "x", "datatype": "FP32", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    text = orjson.dumps({"inputs": [x], "parameters": {"binary_data_output": is_binary}})
    return {
        "content": text + np.arange(count, dtype=np.float32).tobytes(),
        "headers": {"Inference-Header-Content-Length": str(len(text))},
    }


@pytest.fixture(scope="module")
def server() -> Iterator[RestServer]:
    with serving(limits=Limits(elements=LIMIT)) as running:
        yield running


@pytest.fixture
def client(server: RestServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.address}", timeout=SECONDS, trust_env=False) as connected:
        yield connected


def test_others_are_answered_while_a_large_answer_is_written(
    server: RestServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        url = f"http://{server.address}/v2/models/echo/infer"
        answer = pool.submit(httpx.post, url, timeout=SECONDS, trust_env=False, **body_of(LARGE, is_binary=False))
        assert held.began.wait(SECONDS)
        assert client.get("/v2/health/live").status_code == 200
        assert server.app.front.unsent.held == 4 * LARGE
        assert not answer.done()
        held.may_go_on.set()
        (output,) = answer.result(SECONDS).json()["outputs"]
    assert output["data"] == list(range(LARGE))
    server.wait_until(lambda: server.app.front.unsent.held == 0)


def test_an_answer_that_nobody_waits_for_is_not_written_on(server: RestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    body = body_of(LARGE, is_binary=False)
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % len(body["content"])
    for name, value in body["headers"].items():
        head += f"{name}: {value}\r\n".encode()
    with server.connect() as sock:
        sock.sendall(head + b"\r\n" + body["content"])
        assert held.began.wait(SECONDS)
    server.wait_until(lambda: server.app.front.requests.held == server.app.front.unsent.held == 0)
    held.may_go_on.set()
    assert httpx.get(f"http://{server.address}/v2/health/live", trust_env=False).status_code == 200


def test_json_is_bounded(server: RestServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v2/models/echo/infer"
    assert client.post(path, **body_of(LIMIT, is_binary=False)).status_code == 200
    assert client.post(path, **body_of(LIMIT + 1, is_binary=True)).status_code == 200
    held = Held(monkeypatch)
    response = client.post(path, **body_of(LIMIT + 1, is_binary=False))
    assert response.status_code == 413
    assert f"{LIMIT + 1} numbers, and {LIMIT} are sent as JSON; ask for binary data" in response.json()["error"]
    assert not held.began.is_set(), "it is refused before any of it is written"
    assert server.engine.refused[-1][1].status is Status.TOO_LARGE


def test_answers_under_way_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    limits = Limits(responses_bytes=160_000)  # one as JSON, or nearly two as they were computed
    with serving(limits=limits) as server, ThreadPoolExecutor(1) as pool:
        url = f"http://{server.address}/v2/models/echo/infer"
        body = body_of(LARGE, is_binary=False)
        first = pool.submit(httpx.post, url, timeout=SECONDS, trust_env=False, **body)
        assert held.began.wait(SECONDS)
        assert "yet to accept" in httpx.post(url, timeout=SECONDS, trust_env=False, **body).json()["error"]
        held.may_go_on.set()
        assert first.result(SECONDS).status_code == 200


@pytest.mark.parametrize("size", [0, 1, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 1])
def test_pieces_make_one_list(size: int) -> None:
    data = np.random.default_rng(size).normal(size=(size, 1)).astype(np.float32)
    response = InferResponse(model="m", version="1", id="", outputs={"x": InferTensor("FP32", data)})
    reply = asyncio.run(write_infer(response, InferCall(Any, {}, False)))
    (x,) = orjson.loads(reply.body)["outputs"]
    np.testing.assert_array_equal(np.array(x["data"], np.float32), data.reshape(-1))
    assert (x["shape"], reply.headers) == ([size, 1], ((b"content-type", b"application/json"),))
