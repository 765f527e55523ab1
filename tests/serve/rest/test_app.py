"""REST as the protocol's independent client sees it, over real sockets."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

import tierstore
from tests.serve.fakes import VERSION
from tests.serve.rest_server import RestServer, serving
from tierstore.serve.messages import NUMBERS
from tierstore.serve.rest import app, infer_body

RANDOM = np.random.default_rng(5)


@pytest.fixture(scope="module")
def server() -> Iterator[RestServer]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: RestServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def array_of(datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = NUMBERS[datatype]
    if dtype.kind == "f":
        return np.asarray(RANDOM.normal(size=shape) * 100, dtype)
    info = np.iinfo(dtype)
    values = np.asarray(RANDOM.integers(info.min, info.max, shape, dtype, endpoint=True))
    if values.size:
        values.flat[0], values.flat[-1] = info.min, info.max
    return values


def input_of(array: np.ndarray, datatype: str, *, binary: bool, name: str = "x") -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


def outputs_of(binary: bool) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput("x", binary_data=binary)]


def test_health(client: triton.InferenceServerClient, server: RestServer) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", VERSION)
    assert not client.is_model_ready("double", "8")
    assert not client.is_model_ready("absent")
    server.engine.is_ready = False
    try:
        assert client.is_server_live()
        assert not client.is_server_ready()
        assert not client.is_model_ready("double")
    finally:
        server.engine.is_ready = True


def test_metadata(client: triton.InferenceServerClient) -> None:
    about = client.get_server_metadata()
    assert (about["name"], about["version"]) == ("tierstore", tierstore.__version__)
    assert "binary_tensor_data" in about["extensions"]
    expected = {
        "name": "double",
        "versions": [VERSION],
        "platform": "tierstore",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
        "parameters": {"features": "a,b"},
    }
    assert client.get_model_metadata("double") == expected
    assert client.get_model_metadata("double", VERSION) == expected


@pytest.mark.parametrize("name", ["get_model_config", "get_model_metadata"])
def test_what_is_not_there_is_told_in_the_protocols_form(client: triton.InferenceServerClient, name: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        getattr(client, name)("absent")
    assert raised.value.status() == "404"
    assert "absent" in raised.value.message()


def test_the_repository_index_lists_all_models(client: triton.InferenceServerClient) -> None:
    names = ["broken", "double", "echo", "full", "late", "slow", "zeros"]
    expected = [{"name": name, "version": "7", "state": "READY"} for name in names]
    assert client.get_model_repository_index() == expected


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
@pytest.mark.parametrize("binary", [True, False])
def test_round_trip(client: triton.InferenceServerClient, datatype: str, shape: tuple[int, ...], binary: bool) -> None:
    array = array_of(datatype, shape)
    result = client.infer("echo", [input_of(array, datatype, binary=binary)], outputs=outputs_of(binary))
    returned = result.as_numpy("x")
    assert returned.shape == array.shape
    assert result.get_response()["model_version"] == VERSION
    assert returned.astype(array.dtype).tobytes() == array.tobytes()


def test_arrays_reach_the_engine_as_the_contract_says(client: triton.InferenceServerClient, server: RestServer) -> None:
    inputs = [
        input_of(array_of(datatype, (5, 3)), datatype, binary=True, name=f"{datatype}{extra}")
        for extra in range(4)
        for datatype in NUMBERS
    ]
    # Names of every length shift what follows by single bytes.
    client.infer("echo", inputs, request_id="i" * 3)
    request = server.engine.seen[-1]
    assert request.protocol == "http"
    assert list(request.inputs) == [each.name() for each in inputs]
    for tensor in request.inputs.values():
        assert tensor.data.dtype == NUMBERS[tensor.datatype]
        assert tensor.data.flags.c_contiguous
        assert tensor.data.flags.aligned


@pytest.mark.parametrize("binary", [True, False])
def test_texts_reach_the_engine_as_bytes(
    client: triton.InferenceServerClient, server: RestServer, binary: bool
) -> None:
    texts = np.array([["02134", ""], ["\u00e9t\u00e9", "17"]], object)
    client.infer(
        "double",
        [input_of(array_of("FP32", (1, 3)), "FP32", binary=True), input_of(texts, "BYTES", binary=binary, name="t")],
    )
    found = server.engine.seen[-1].inputs["t"].data
    assert found.tolist() == [[b"02134", b""], ["\u00e9t\u00e9".encode(), b"17"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate", None])
def test_doubled(client: triton.InferenceServerClient, algorithm: str | None) -> None:
    x = array_of("FP32", (4, 3))
    result = client.infer(
        "double",
        [input_of(x, "FP32", binary=True)],
        model_version=VERSION,
        request_id="mine",
        request_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), x * 2)
    assert result.get_response()["id"] == "mine"


@pytest.mark.parametrize(("rows", "is_long"), [(4, False), (1 << 19, True)])
def test_a_long_body_does_not_hold_the_loop_up(
    client: triton.InferenceServerClient, server: RestServer, rows: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are joined, and its tensors taken from them, in another thread."""
    threads: list[int] = []

    def parse(body: bytes, **options: Any) -> infer_body.InferCall:
        threads.append(threading.get_ident())
        return infer_body.parse_infer(body, **options)

    monkeypatch.setattr(app, "parse_infer", parse)
    x = array_of("FP32", (rows, 1))
    result = client.infer("double", [input_of(x, "FP32", binary=True)])
    np.testing.assert_array_equal(result.as_numpy("y"), x * 2)

    async def of_loop() -> int:
        return threading.get_ident()

    assert (threads != [server.call(of_loop())]) == is_long


def test_long_bodies_are_taken_apart_one_at_a_time(server: RestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each is there twice meanwhile."""
    running, most = 0, 0

    def parse(body: bytes, **options: Any) -> infer_body.InferCall:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.1)  # for another to come
        running -= 1
        return infer_body.parse_infer(body, **options)

    monkeypatch.setattr(app, "parse_infer", parse)
    x = array_of("FP32", (1 << 19, 1))

    def ask() -> None:
        with triton.InferenceServerClient(server.address) as client:
            np.testing.assert_array_equal(client.infer("echo", [input_of(x, "FP32", binary=True)]).as_numpy("x"), x)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(ask) for _ in range(3)]:
            each.result()
    assert most == 1


def test_some_outputs_binary_and_some_not(client: triton.InferenceServerClient) -> None:
    a, b = array_of("INT64", (3,)), array_of("FP32", (2, 2))
    result = client.infer(
        "echo",
        [input_of(a, "INT64", binary=False, name="a"), input_of(b, "FP32", binary=True, name="b")],
        outputs=[
            triton.InferRequestedOutput("a", binary_data=True),
            triton.InferRequestedOutput("b", binary_data=False),
        ],
    )
    np.testing.assert_array_equal(result.as_numpy("a"), a)
    np.testing.assert_array_equal(result.as_numpy("b"), b)
    assert "data" not in result.get_output("a")
    np.testing.assert_array_equal(np.array(result.get_output("b")["data"], np.float32), b.reshape(-1))


@pytest.mark.parametrize(
    ("model", "version", "status"),
    [
        ("full", "", "503"),
        ("late", "", "504"),
        ("broken", "", "500"),
        ("absent", "", "404"),
        ("double", "8", "404"),
    ],
)
def test_errors(client: triton.InferenceServerClient, model: str, version: str, status: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [input_of(array_of("FP32", (1, 3)), "FP32", binary=True)], model_version=version)
    assert raised.value.status() == status
    assert raised.value.message()


def test_a_mistake_names_the_input(client: triton.InferenceServerClient, server: RestServer) -> None:
    with pytest.raises(InferenceServerException, match="input 'x' must be FP32") as raised:
        client.infer("double", [input_of(array_of("INT32", (1, 3)), "INT32", binary=True)])
    assert raised.value.status() == "400"


def test_deadline(client: triton.InferenceServerClient, server: RestServer) -> None:
    inputs = [input_of(array_of("FP32", (1, 3)), "FP32", binary=True)]
    before = time.monotonic()
    client.infer("double", inputs, timeout=30_000_000)
    after = time.monotonic()
    deadline = server.engine.seen[-1].deadline
    assert deadline is not None
    assert before + 30 <= deadline <= after + 30
    client.infer("double", inputs)
    assert server.engine.seen[-1].deadline is None


def test_outputs_reach_the_engine_and_other_parameters_do_no_harm(
    client: triton.InferenceServerClient, server: RestServer
) -> None:
    inputs = [input_of(array_of("FP32", (1, 3)), "FP32", binary=True)]
    outputs = [triton.InferRequestedOutput("y")]
    client.infer("double", inputs, outputs=outputs, priority=3, parameters={"mode": "exact", "flag": True})
    assert server.engine.seen[-1].outputs == ("y",)


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_many_at_once(use_uvloop: bool) -> None:
    async def one(client: triton_aio.InferenceServerClient, number: int) -> None:
        x = np.full((1 + number % 5, 3), number, np.float32)
        result = await client.infer("double", [input_of(x, "FP32", binary=number % 2 == 0)], request_id=str(number))
        np.testing.assert_array_equal(result.as_numpy("y"), x * 2)
        assert result.get_response()["id"] == str(number)

    async def main(address: str) -> None:
        async with triton_aio.InferenceServerClient(address, conn_limit=20) as client:
            assert await client.is_server_ready()
            await asyncio.gather(*(one(client, number) for number in range(100)))

    with serving(use_uvloop=use_uvloop) as running:
        asyncio.run(main(running.address))
        assert len(running.engine.seen) == 100
        assert running.app.front.requests.held == 0
        assert running.refused == running.engine.refused == []
