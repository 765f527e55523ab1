"""The gRPC server through real sockets, by the protocol's independent client."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import tierstore
from tests.serve.fakes import VERSION, FakeEngine
from tests.serve.grpc_harness import WAIT_SECONDS, Served, serving, wait_until
from tierstore.serve.grpc.server import GrpcServer
from tierstore.serve.limits import Limits
from tierstore.serve.messages import NUMBERS, InferResponse, ServeError

X = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)

CODES = {"broken": "INTERNAL", "full": "RESOURCE_EXHAUSTED", "late": "DEADLINE_EXCEEDED", "nobody": "NOT_FOUND"}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.address) as client:
        yield client


@pytest.fixture
def stub(served: Served) -> Iterator[Any]:
    """The client's generated stub, for requests that its own interface does not make."""
    with grpc.insecure_channel(served.address) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, datatype: str, data: np.ndarray) -> triton.InferInput:
    made = triton.InferInput(name, data.shape, datatype)
    made.set_data_from_numpy(data)
    return made


def x_input() -> triton.InferInput:
    return tensor("x", "FP32", X)


def sample(datatype: str) -> np.ndarray:
    dtype = NUMBERS[datatype]
    if np.issubdtype(dtype, np.integer):
        return np.array([[np.iinfo(dtype).min, np.iinfo(dtype).max, 1]], dtype=dtype)
    return np.array([[-0.5, np.finfo(dtype).max, np.inf]], dtype=dtype)


def code_of(error: InferenceServerException) -> str:
    return error.status().removeprefix("StatusCode.")


# Health and metadata.


def test_health(served: Served, client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", VERSION)
    assert not client.is_model_ready("echo", "6")
    assert not client.is_model_ready("nobody")
    served.engine.is_ready = False
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("echo")
    served.engine.is_live = False
    assert not client.is_server_live()


def test_health_service_of_grpc(served: Served) -> None:
    serving_status, not_serving = b"\x08\x01", b"\x08\x02"
    with grpc.insecure_channel(served.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=WAIT_SECONDS) == serving_status
        name = b"inference.GRPCInferenceService"
        assert check(bytes([10, len(name)]) + name, timeout=WAIT_SECONDS) == serving_status
        with pytest.raises(grpc.RpcError) as raised:
            check(b"\x0a\x01x", timeout=WAIT_SECONDS)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        served.engine.is_ready = False
        assert check(b"", timeout=WAIT_SECONDS) == not_serving


def test_server_metadata(client: triton.InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert (metadata.name, metadata.version) == ("tierstore", tierstore.__version__)


def test_model_metadata(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("double")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("double", [VERSION], "tierstore")
    assert [(spec.name, spec.datatype, list(spec.shape)) for spec in metadata.inputs] == [("x", "FP32", [-1, 3])]
    assert [(spec.name, spec.datatype, list(spec.shape)) for spec in metadata.outputs] == [("y", "FP32", [-1, 3])]


def test_metadata_of_no_model(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="did you mean 'echo'") as raised:
        client.get_model_metadata("nobody")
    assert code_of(raised.value) == "NOT_FOUND"


def test_repository_index(served: Served, client: triton.InferenceServerClient) -> None:
    models = client.get_model_repository_index().models
    assert [(model.name, model.version, model.state) for model in models][:2] == [
        ("broken", VERSION, "READY"),
        ("double", VERSION, "READY"),
    ]
    served.engine.is_ready = False
    assert {model.state for model in client.get_model_repository_index().models} == {"UNAVAILABLE"}


def test_unknown_call(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/inference.GRPCInferenceService/TraceSetting")(b"", timeout=WAIT_SECONDS)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


# Inference.


def test_infer(served: Served, client: triton.InferenceServerClient) -> None:
    result = client.infer("double", [x_input()], request_id="r1", model_version=VERSION)
    assert np.array_equal(result.as_numpy("y"), X * 2)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("double", VERSION, "r1")
    (request,) = served.engine.seen
    assert (request.protocol, request.version, request.deadline, request.outputs) == ("grpc", VERSION, None, ())


@pytest.mark.parametrize("datatype", NUMBERS)
def test_datatypes_raw(served: Served, stub: Any, datatype: str) -> None:
    data = sample(datatype)
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype=datatype, shape=data.shape)
    raw = data.tobytes()
    request.raw_input_contents.append(raw)
    response = stub.ModelInfer(request, timeout=WAIT_SECONDS)
    assert list(response.raw_output_contents) == [raw]
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("x", datatype, list(data.shape))
    assert not output.HasField("contents")
    assert np.array_equal(served.engine.seen[0].inputs["x"].data, data)
    assert not served.engine.seen[0].inputs["x"].data.flags.writeable
    assert served.engine.seen[0].inputs["x"].data.flags.aligned


@pytest.mark.parametrize("datatype", NUMBERS)
def test_datatypes_typed(served: Served, stub: Any, datatype: str) -> None:
    data = sample(datatype)
    name = {"INT32": "int", "INT64": "int64", "FP32": "fp32"}[datatype] + "_contents"
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype=datatype, shape=data.shape)
    getattr(request.inputs[0].contents, name).extend(data.reshape(-1).tolist())
    response = stub.ModelInfer(request, timeout=WAIT_SECONDS)
    assert not response.raw_output_contents
    assert response.outputs[0].contents == request.inputs[0].contents
    assert np.array_equal(served.engine.seen[0].inputs["x"].data, data)


@pytest.mark.parametrize("is_raw", [True, False])
def test_texts_reach_the_engine_as_bytes(
    served: Served, client: triton.InferenceServerClient, stub: Any, is_raw: bool
) -> None:
    texts = np.array([["02134", ""], ["\u00e9t\u00e9", "17"]], object)
    if is_raw:
        client.infer("double", [x_input(), tensor("t", "BYTES", texts)])
    else:
        request = service_pb2.ModelInferRequest(model_name="double")
        request.inputs.add(name="x", datatype="FP32", shape=X.shape)
        request.inputs[0].contents.fp32_contents.extend(X.reshape(-1).tolist())
        request.inputs.add(name="t", datatype="BYTES", shape=texts.shape)
        request.inputs[1].contents.bytes_contents.extend(text.encode() for text in texts.reshape(-1))
        stub.ModelInfer(request, timeout=WAIT_SECONDS)
    found = served.engine.seen[-1].inputs["t"].data
    assert found.tolist() == [[b"02134", b""], ["\u00e9t\u00e9".encode(), b"17"]]


def test_outputs_are_passed_on_and_other_parameters_are_not(
    served: Served, client: triton.InferenceServerClient
) -> None:
    wanted = [triton.InferRequestedOutput("x"), triton.InferRequestedOutput("y")]
    client.infer(
        "echo", [x_input()], outputs=wanted, parameters={"a": "text", "b": True, "c": -5, "d": 0.5}, priority=3
    )
    (request,) = served.engine.seen
    assert request.outputs == ("x", "y")


@pytest.mark.parametrize("model", CODES)
def test_failures_have_status_and_message(served: Served, client: triton.InferenceServerClient, model: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, [x_input()])
    assert code_of(raised.value) == CODES[model]
    assert not served.engine.refused, "the engine was asked, and counts it itself"


def test_unexpected_failures_tell_nothing(
    served: Served, client: triton.InferenceServerClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def infer(request: Any) -> InferResponse:
        raise RuntimeError("a secret")

    served.engine.infer = infer
    with pytest.raises(InferenceServerException) as raised:
        client.infer("echo", [x_input()])
    assert code_of(raised.value) == "INTERNAL"
    assert "secret" not in str(raised.value)
    assert "a secret" in caplog.text


def test_long_messages_are_cut(served: Served, client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.get_model_metadata("\N{SNOWMAN}" * 100_000)
    assert code_of(raised.value) == "NOT_FOUND"
    assert len(raised.value.message()) < 600


def test_bytes_that_are_no_message(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        for call in ("ModelInfer", "ModelMetadata", "ServerLive"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/inference.GRPCInferenceService/{call}")(b"\xff\xff", timeout=WAIT_SECONDS)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    ((protocol, error),) = served.engine.refused
    assert protocol == "grpc"
    assert isinstance(error, ServeError)


def test_what_is_refused_is_counted(served: Served, stub: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[b"123"])
    request.inputs.add(name="the_input", datatype="FP32", shape=[1])
    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(request, timeout=WAIT_SECONDS)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'the_input'" in raised.value.details()
    assert [protocol for protocol, _ in served.engine.refused] == ["grpc"]
    assert not served.engine.seen


# Deadlines and cancellation.


def test_deadline_of_the_call_is_the_requests(served: Served, client: triton.InferenceServerClient) -> None:
    client.infer("echo", [x_input()], client_timeout=500)
    client.infer("echo", [x_input()], client_timeout=500, timeout=100_000_000)
    client.infer("echo", [x_input()], timeout=100_000_000)
    by_call, sooner, by_parameter = (request.deadline for request in served.engine.seen)
    assert by_call is not None
    assert by_call - sooner > 300
    assert abs(sooner - by_parameter) < WAIT_SECONDS


def test_deadline_passes(served: Served, client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer("slow", [x_input()], client_timeout=0.05)
    assert code_of(raised.value) == "DEADLINE_EXCEEDED"
    # Either the call is cancelled while the engine holds it, or it came too late to be begun.
    wait_until(lambda: len(served.engine.cancelled) == len(served.engine.seen), "the engine to be told")


def test_cancelled_call_cancels_the_engine(served: Served, client: triton.InferenceServerClient) -> None:
    call = client.async_infer("slow", [x_input()], callback=lambda result, error: None)
    wait_until(lambda: bool(served.engine.seen), "the request to arrive")
    call.cancel()
    wait_until(lambda: bool(served.engine.cancelled), "the engine to be told")
    assert served.engine.cancelled == served.engine.seen
    assert np.array_equal(client.infer("double", [x_input()]).as_numpy("y"), X * 2)


def test_client_that_vanishes_cancels_the_engine(served: Served) -> None:
    with triton.InferenceServerClient(served.address) as client:
        client.async_infer("slow", [x_input()], callback=lambda result, error: None)
        wait_until(lambda: bool(served.engine.seen), "the request to arrive")
    wait_until(lambda: bool(served.engine.cancelled), "the engine to be told")
    assert served.engine.cancelled == served.engine.seen


# Streams.


class Stream:
    """What a stream answered, in order: (result, error). Its end cancels it: the client would wait for it."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.stop_stream(cancel_requests=True)

    def next(self) -> tuple[Any, Any]:
        return self._answers.get(timeout=WAIT_SECONDS)


def test_stream_answers_in_order(served: Served, client: triton.InferenceServerClient) -> None:
    with Stream(client) as stream:
        client.async_stream_infer("slow", [x_input()], request_id="first")
        for index in range(50):
            client.async_stream_infer("double", [tensor("x", "FP32", X + index)], request_id=str(index))
        wait_until(lambda: len(served.engine.seen) >= 8, "as many as are computed at a time")
        client.is_server_live()
        assert len(served.engine.seen) == 8
        served.let_go()
        assert stream.next()[0].get_response().id == "first"
        for index in range(50):
            result, error = stream.next()
            assert error is None
            assert result.get_response().id == str(index)
            assert np.array_equal(result.as_numpy("y"), (X + index) * 2)


def test_stream_goes_on_after_an_error(served: Served, client: triton.InferenceServerClient) -> None:
    with Stream(client) as stream:
        client.async_stream_infer("full", [x_input()], request_id="a")
        client.async_stream_infer("echo", [x_input()], request_id="b")
        result, error = stream.next()
        assert result is None
        assert "the queue is full" in str(error)
        result, error = stream.next()
        assert result.get_response().id == "b"


def test_stream_error_names_its_request(served: Served, stub: Any) -> None:
    bad = service_pb2.ModelInferRequest(model_name="echo", id="bad", raw_input_contents=[b""])
    good = service_pb2.ModelInferRequest(model_name="echo", id="good")
    first, second = stub.ModelStreamInfer(iter([bad, good]), timeout=WAIT_SECONDS)
    assert "raw_input_contents" in first.error_message
    assert first.infer_response.id == "bad"
    assert (second.error_message, second.infer_response.id) == ("", "good")


def test_malformed_message_in_a_stream(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = [
            service_pb2.ModelStreamInferResponse.FromString(answer)
            for answer in call(iter([b"\xff", b"\x0a\x04echo"]), timeout=WAIT_SECONDS)
        ]
    assert "malformed" in answers[0].error_message
    assert answers[1].infer_response.model_name == "echo"


def test_cancelled_stream_cancels_the_engine(
    served: Served, client: triton.InferenceServerClient, caplog: pytest.LogCaptureFixture
) -> None:
    with Stream(client):
        for _ in range(3):
            client.async_stream_infer("slow", [x_input()])
        wait_until(lambda: len(served.engine.seen) == 3, "the requests to arrive")
    wait_until(lambda: len(served.engine.cancelled) == 3, "the engine to be told")
    assert client.is_server_live()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Many at once, start and stop.


def test_many_concurrent_requests(served: Served) -> None:
    async def ask(client: triton_aio.InferenceServerClient, index: int) -> bool:
        result = await client.infer("double", [tensor("x", "FP32", X + index)], request_id=str(index))
        return result.get_response().id == str(index) and np.array_equal(result.as_numpy("y"), (X + index) * 2)

    async def all_of_them() -> list[bool]:
        async with triton_aio.InferenceServerClient(served.address) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(200)))

    assert all(asyncio.run(asyncio.wait_for(all_of_them(), WAIT_SECONDS)))
    assert len(served.engine.seen) == 200


def test_stop_lets_requests_end(served: Served) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(served.address) as client:
        client.async_infer("slow", [x_input()], callback=lambda result, error: answers.put((result, error)))
        wait_until(lambda: bool(served.engine.seen), "the request to arrive")
        stopping = threading.Thread(target=served.call, args=(served.server.stop(WAIT_SECONDS),))
        stopping.start()
        wait_until(lambda: refuses(served.address), "the server to take no more calls")
        assert stopping.is_alive()
        served.let_go()
        result, error = answers.get(timeout=WAIT_SECONDS)
        stopping.join(WAIT_SECONDS)
    assert error is None
    assert np.array_equal(result.as_numpy("x"), X)
    assert not stopping.is_alive()


def refuses(address: str) -> bool:
    with triton.InferenceServerClient(address) as client:
        try:
            client.is_server_live(client_timeout=1)
        except InferenceServerException:
            return True
    return False


def test_stop_ends_requests_after_its_grace(served: Served, client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("slow", [x_input()], callback=lambda result, error: answers.put(error))
    wait_until(lambda: bool(served.engine.seen), "the request to arrive")
    served.call(served.server.stop(0.05))
    assert isinstance(answers.get(timeout=WAIT_SECONDS), InferenceServerException)
    wait_until(lambda: bool(served.engine.cancelled), "the engine to be told")
    assert served.engine.cancelled == served.engine.seen
    served.call(served.server.stop())


def test_runs_in_the_loop_it_is_started_in() -> None:
    """As in the server: uvloop, and a client in the same loop."""
    uvloop = pytest.importorskip("uvloop")

    async def session() -> np.ndarray:
        server = GrpcServer(FakeEngine(), Limits(), host="127.0.0.1", port=0)
        port = await server.start()
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
            result = await client.infer("double", [x_input()])
        await server.stop(1)
        return result.as_numpy("y")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert np.array_equal(runner.run(asyncio.wait_for(session(), WAIT_SECONDS)), X * 2)
