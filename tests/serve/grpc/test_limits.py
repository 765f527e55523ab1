"""What the gRPC server lets a client do: sizes, numbers, tokens, TLS, ports."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.serve.fakes import FakeEngine
from tests.serve.grpc_harness import WAIT_SECONDS, serving, wait_until
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.grpc.server import GrpcServer
from tierstore.serve.limits import Limits
from tierstore.serve.messages import ServeError
from tierstore.serve.tls import Tls

MEBIBYTE = 1 << 20
TOKEN = "a-token"


def x_input(num_rows: int = 1) -> triton.InferInput:
    made = triton.InferInput("x", (num_rows, 3), "FP32")
    made.set_data_from_numpy(np.zeros((num_rows, 3), dtype=np.float32))
    return made


def code_of(error: InferenceServerException) -> str:
    return error.status().removeprefix("StatusCode.")


@pytest.fixture
def client_of(request: pytest.FixtureRequest) -> Any:
    """Makes clients that are closed when the test is over."""

    def make(address: str, **options: Any) -> triton.InferenceServerClient:
        client = triton.InferenceServerClient(address, **options)
        request.addfinalizer(client.close)
        request.addfinalizer(lambda: client.stop_stream(cancel_requests=True))
        return client

    return make


# Sizes.


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_large_request_is_refused(client_of: Any, compression: str | None) -> None:
    """Compressed, a thousandth of it is on the wire: what counts is its size in memory."""
    with serving(Limits(body_bytes=MEBIBYTE)) as served:
        client = client_of(served.address)
        client.infer("echo", [x_input(80_000)], compression_algorithm=compression)
        with pytest.raises(InferenceServerException) as raised:
            client.infer("echo", [x_input(1_000_000)], compression_algorithm=compression)
        assert code_of(raised.value) == "RESOURCE_EXHAUSTED"
        assert len(served.engine.seen) == 1
        assert client.is_server_live()


def test_large_response_is_refused(client_of: Any) -> None:
    with serving(Limits(response_bytes=MEBIBYTE)) as served:
        client = client_of(served.address)
        assert client.infer("echo", [x_input(80_000)]).as_numpy("x").shape == (80_000, 3)
        with pytest.raises(InferenceServerException, match="ask for less") as raised:
            client.infer("echo", [x_input(100_000)])
        assert code_of(raised.value) == "RESOURCE_EXHAUSTED"


def test_large_response_in_a_stream_ends_only_its_request(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(Limits(response_bytes=MEBIBYTE)) as served:
        client = client_of(served.address)
        client.start_stream(lambda result, error: answers.put(error))
        for num_rows in (100_000, 1):
            client.async_stream_infer("echo", [x_input(num_rows)])
        assert "ask for less" in str(answers.get(timeout=WAIT_SECONDS))
        assert answers.get(timeout=WAIT_SECONDS) is None
        client.stop_stream()


def test_large_metadata_is_refused(client_of: Any) -> None:
    with serving(Limits(header_bytes=2048)) as served:
        client = client_of(served.address)
        assert client.is_server_live(headers={"a": "b" * 100})
        with pytest.raises(InferenceServerException) as raised:
            client.is_server_live(headers={"a": "b" * 5000})
        assert code_of(raised.value) == "RESOURCE_EXHAUSTED"


# Numbers.


def test_too_many_calls_are_refused(client_of: Any) -> None:
    with serving(Limits(calls=2)) as served:
        client = client_of(served.address)
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(2):
            client.async_infer("slow", [x_input()], callback=lambda result, error: answers.put(error))
        wait_until(lambda: len(served.engine.seen) == 2, "the requests to arrive")
        with pytest.raises(InferenceServerException, match="2 calls are under way") as raised:
            client.infer("echo", [x_input()])
        assert code_of(raised.value) == "RESOURCE_EXHAUSTED"
        assert client.is_server_ready(), "health is answered all the same"
        assert [protocol for protocol, _ in served.engine.refused] == ["grpc"]
        served.let_go()
        assert [answers.get(timeout=WAIT_SECONDS) for _ in range(2)] == [None, None]
        client.infer("echo", [x_input()])


def test_requests_under_way_are_bounded_in_bytes(client_of: Any) -> None:
    with serving(Limits(bodies_bytes=2 * MEBIBYTE)) as served:
        client, streamer = client_of(served.address), client_of(served.address)
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer("slow", [x_input(100_000)], callback=lambda result, error: answers.put(error))
        wait_until(lambda: len(served.engine.seen) == 1, "the request to arrive")
        with pytest.raises(InferenceServerException, match="hold 2097152 bytes") as raised:
            client.infer("echo", [x_input(100_000)])
        assert code_of(raised.value) == "RESOURCE_EXHAUSTED"
        streamer.start_stream(lambda result, error: answers.put(error))
        streamer.async_stream_infer("echo", [x_input(100_000)])
        assert "hold 2097152 bytes" in str(answers.get(timeout=WAIT_SECONDS))
        client.infer("echo", [x_input()])
        served.let_go()
        assert answers.get(timeout=WAIT_SECONDS) is None
        client.infer("echo", [x_input(100_000)])


def test_streams_leave_room_for_other_calls(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(Limits(streams=1)) as served:
        holder, other = client_of(served.address), client_of(served.address)
        holder.start_stream(lambda result, error: answers.put(error))
        holder.async_stream_infer("echo", [x_input()])
        assert answers.get(timeout=WAIT_SECONDS) is None
        other.start_stream(lambda result, error: answers.put(error))
        other.async_stream_infer("echo", [x_input()])
        assert "1 streams are open" in str(answers.get(timeout=WAIT_SECONDS))
        assert other.infer("echo", [x_input()]).as_numpy("x").shape == (1, 3)
        assert isinstance(served.engine.refused[0][1], ServeError)


def test_idle_stream_is_ended(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(Limits(streams=1, stream_idle_seconds=0.2)) as served:
        for _ in range(2):
            client = client_of(served.address)
            client.start_stream(lambda result, error: answers.put(error))
            client.async_stream_infer("echo", [x_input()])
            assert answers.get(timeout=WAIT_SECONDS) is None
            error = answers.get(timeout=WAIT_SECONDS)
            assert code_of(error) == "DEADLINE_EXCEEDED"
            assert "nothing came on the stream" in str(error)


def test_stream_is_answered_before_it_is_ended_as_idle(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(Limits(stream_idle_seconds=0.2)) as served:
        client = client_of(served.address)
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("slow", [x_input()])
        with pytest.raises(queue.Empty):
            answers.get(timeout=0.5)
        served.let_go()
        assert answers.get(timeout=WAIT_SECONDS) is None
        assert code_of(answers.get(timeout=WAIT_SECONDS)) == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_request_that_does_not_come_is_not_waited_for(method: str) -> None:
    go_on = threading.Event()

    def requests() -> Iterator[Any]:
        go_on.wait(WAIT_SECONDS)
        yield b""

    with serving(Limits(receive_seconds=0.2)) as served, grpc.insecure_channel(served.address) as channel:
        call = channel.stream_stream(f"/{INFERENCE_SERVICE}/{method}")(requests(), timeout=WAIT_SECONDS)
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not come within 0.2 seconds" in call.details()
        go_on.set()
        assert isinstance(served.engine.refused[0][1], ServeError)


def test_call_without_a_request() -> None:
    with serving() as served, grpc.insecure_channel(served.address) as channel:
        infer = channel.stream_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError, match="ended without a request") as raised:
            infer(iter([]), timeout=WAIT_SECONDS)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_stream_may_end_without_a_request() -> None:
    with serving() as served, grpc.insecure_channel(served.address) as channel:
        infer = channel.stream_stream(f"/{INFERENCE_SERVICE}/ModelStreamInfer")
        assert list(infer(iter([]), timeout=WAIT_SECONDS)) == []
        assert not served.engine.refused


def test_stream_counts_as_a_call(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(Limits(calls=1)) as served:
        client = client_of(served.address)
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("echo", [x_input()])
        assert answers.get(timeout=WAIT_SECONDS) is None
        with pytest.raises(InferenceServerException, match="1 calls are under way"):
            client.infer("echo", [x_input()])
        client.stop_stream()
        wait_until(lambda: succeeds(client), "the stream's place to be free")


def succeeds(client: triton.InferenceServerClient) -> bool:
    try:
        client.infer("echo", [x_input()])
    except InferenceServerException:
        return False
    return True


# Tokens.


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("another"),
        bearer(TOKEN + "x"),
        bearer(TOKEN[:-1]),
        bearer(""),
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
    ],
)
def test_without_token(client_of: Any, headers: dict[str, str]) -> None:
    with serving(token=TOKEN) as served:
        client = client_of(served.address)
        for call in (
            lambda: client.infer("echo", [x_input()], headers=headers, client_timeout=WAIT_SECONDS),
            lambda: client.get_server_metadata(headers=headers),
            lambda: client.get_model_repository_index(headers=headers),
        ):
            with pytest.raises(InferenceServerException) as raised:
                call()
            assert code_of(raised.value) == "UNAUTHENTICATED"
            assert TOKEN not in str(raised.value)
        assert not served.engine.seen
        assert len(served.engine.refused) == 3


def test_stream_without_token_is_ended_before_it_speaks(client_of: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with serving(token=TOKEN) as served:
        client = client_of(served.address)
        client.start_stream(lambda result, error: answers.put(error))
        assert code_of(answers.get(timeout=WAIT_SECONDS)) == "UNAUTHENTICATED"
        client.stop_stream()


def test_with_token(client_of: Any) -> None:
    with serving(token=TOKEN) as served:
        client = client_of(served.address)
        assert client.infer("echo", [x_input()], headers=bearer(TOKEN)).as_numpy("x").shape == (1, 3)
        assert client.get_server_metadata(headers={"authorization": f"bearer {TOKEN}"}).name == "tierstore"
        assert not served.engine.refused


def test_health_needs_no_token(client_of: Any) -> None:
    with serving(token=TOKEN) as served, grpc.insecure_channel(served.address) as channel:
        client = client_of(served.address)
        assert client.is_server_live()
        assert client.is_server_ready()
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WAIT_SECONDS) == b"\x08\x01"


@pytest.mark.parametrize("model", ["echo", "nobody"])
def test_names_of_models_are_not_told_without_the_token(client_of: Any, model: str) -> None:
    with serving(token=TOKEN) as served:
        client = client_of(served.address)
        with pytest.raises(InferenceServerException) as raised:
            client.is_model_ready(model)
        assert "UNAUTHENTICATED" in str(raised.value.status())
        assert client.is_model_ready(model, headers=bearer(TOKEN)) == (model == "echo")


@pytest.mark.parametrize("token", ["", "two words", "\n", "\N{SNOWMAN}"])
def test_token_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        GrpcServer(FakeEngine(), token=token)


# TLS.


def test_tls(client_of: Any, tls: Tls) -> None:
    with serving(tls=tls) as served:
        client = client_of(served.address, ssl=True, root_certificates=str(tls.certificate))
        assert client.infer("echo", [x_input()]).as_numpy("x").shape == (1, 3)
        with pytest.raises(InferenceServerException) as raised:
            client_of(served.address).is_server_live(client_timeout=WAIT_SECONDS)
        assert code_of(raised.value) == "UNAVAILABLE"


def test_tls_files_are_checked(tls: Tls, tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("no key")
    for key in ("absent.pem", "other.pem"):
        with pytest.raises(ValueError, match=key):
            GrpcServer(FakeEngine(), tls=Tls(tls.certificate, tmp_path / key))


# Ports.


@pytest.fixture
def taken_port() -> Iterator[int]:
    with serving() as served:
        yield served.port


def test_port_that_is_taken(taken_port: int) -> None:
    async def start() -> None:
        await GrpcServer(FakeEngine(), port=taken_port).start()

    with pytest.raises(OSError, match=f"gRPC cannot listen on 127.0.0.1:{taken_port}"):
        asyncio.run(start())


def test_port_is_shared_if_told() -> None:
    with serving(reuse_port=True) as first, serving(reuse_port=True, port=first.port) as second:
        assert second.port == first.port


def test_ipv6() -> None:
    with serving(host="::1") as served, grpc.insecure_channel(f"[::1]:{served.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live


def test_stopped_server_leaves_its_port() -> None:
    with serving() as served:
        port = served.port
    with serving(port=port) as served:
        assert served.port == port
    assert "grpc-server" not in [thread.name for thread in threading.enumerate()]
