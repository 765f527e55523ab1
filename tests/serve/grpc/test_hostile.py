"""Clients that accept no answers, send no requests, or reset calls: each loses that call, and nobody else any."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serve.grpc_harness import WAIT_SECONDS, Served, serving, wait_until
from tests.serve.raw_http2 import RawClient
from tierstore.serve.config import ServeConfig
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.limits import Limits
from tierstore.serve.program import Server

MEBIBYTE = 1 << 20
INFER = f"/{INFERENCE_SERVICE}/ModelInfer"
STREAM = f"/{INFERENCE_SERVICE}/ModelStreamInfer"


def request_of(size: int, model: str = "zeros") -> Any:
    """A short one, whose answer is as long as that."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="INT64", shape=[1])
    message.raw_input_contents.append(np.int64(size).tobytes())
    return message


LARGE, SMALL = (request_of(size).SerializeToString() for size in (4 * MEBIBYTE, 1))


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stub_of(served: Served, resources: ExitStack) -> Any:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return service_pb2_grpc.GRPCInferenceServiceStub(
        resources.enter_context(grpc.insecure_channel(served.address, options))
    )


def raw_client(served: Served, resources: ExitStack, **options: Any) -> RawClient:
    client = resources.enter_context(RawClient(served.port, timeout_seconds=WAIT_SECONDS, **options))
    call_nobody(client)
    return client


def call_nobody(client: RawClient) -> None:
    """gRPC's loop keeps the first call that came, and the last until there is another: that is to be one of these."""
    client.wait_end(client.begin("/nobody/Nothing"))


def unsent_bytes(served: Served) -> int:
    return served.server._service.front.unsent.held


def answers_of(stub: Any, size: int = 1) -> int:
    """The size of an answer."""
    return len(stub.ModelInfer(request_of(size), timeout=WAIT_SECONDS).raw_output_contents[0])


# Answers that are not accepted.


@pytest.mark.parametrize(
    ("method", "message"), [(INFER, LARGE), (INFER, SMALL), (STREAM, LARGE)], ids=["large", "small", "stream"]
)
@pytest.mark.parametrize("window_bytes", [0, 2])
def test_an_answer_that_is_not_accepted_ends_its_call_alone(
    resources: ExitStack, method: str, message: bytes, window_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Limits(send_seconds=0.2, stream_idle_seconds=0.2)) as served:
        client = raw_client(served, resources, window_bytes=window_bytes)
        calls = [client.begin(method, message) for _ in range(3)]
        wait_until(lambda: len(served.engine.seen) == 3, "them to be asked")
        slow = client.begin(INFER, request_of(1, "slow").SerializeToString())
        for call in calls:
            assert len(client.wait_end(call)) == window_bytes
        wait_until(lambda: unsent_bytes(served) == 0, "what they held to be free")
        assert caplog.text.count("accepted no answer for 0.2 seconds") == 3
        client.wait_handled()
        assert not served.engine.cancelled, "a call of the same connection goes on"
        served.let_go()
        call_nobody(client)
        assert len(client.wait_end(slow)) == window_bytes


def test_a_client_that_reads_nothing_at_all_does_not_keep_its_call(resources: ExitStack) -> None:
    """Its socket takes no more, so that gRPC cannot even tell it that the call is over."""
    with serving(Limits(send_seconds=0.2)) as served:
        client = raw_client(served, resources, window_bytes=(1 << 31) - 1)
        message = request_of(30 * MEBIBYTE).SerializeToString()
        for _ in range(3):
            client.begin(INFER, message)
        wait_until(lambda: len(served.engine.seen) == 3, "them to be asked")
        wait_until(lambda: unsent_bytes(served) == 0, "what they held to be free")
        assert answers_of(stub_of(served, resources)) == 1
        client.close()


def test_unread_answers_hold_no_place_of_inference(resources: ExitStack) -> None:
    with serving(Limits(calls=1)) as served:
        client, stub = raw_client(served, resources), stub_of(served, resources)
        for count in range(1, 4):
            client.begin(INFER, LARGE)
            wait_until(lambda count=count: unsent_bytes(served) > 4 * count * MEBIBYTE, "it to be answered")
        wait_until(lambda: answers_of(stub) == 1, "an answer")


# Requests that do not come.


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_half_open_calls_do_not_keep_others_out(resources: ExitStack, method: str) -> None:
    """Nor those whose request has come in part, though the server holds but 16 of the 600 at a time."""
    limits = Limits(calls=2)
    with serving(limits) as served:
        stub = stub_of(served, resources)
        for number in range(4):
            client = raw_client(served, resources)
            message = b"" if number % 2 else None
            begun = [
                client.frames_to_begin(f"/{INFERENCE_SERVICE}/{method}", message, is_whole=False, length=100)[1]
                for _ in range(150)
            ]
            client.send(b"".join(begun))
            for _ in range(20):
                assert answers_of(stub) == 1
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live
                [answer] = stub.ModelStreamInfer(iter([request_of(1)]), timeout=WAIT_SECONDS)
                assert not answer.error_message
        assert {str(error).split(" requests are arriving")[0] for _, error in served.engine.refused} == {"16"}


def test_receive_seconds_of_the_server_are_those_of_grpc() -> None:
    async def check() -> None:
        assert Server(ServeConfig(store="unused", receive_seconds=7.0))._grpc._limits.receive_seconds == 7.0

    asyncio.run(check())


# Calls that are reset.


def test_calls_that_are_reset_do_not_cancel_those_of_others(resources: ExitStack) -> None:
    """gRPC has calls wait for the event loop, and by default it cancels whatever comes above 3000."""
    may_go_on = threading.Event()
    with serving() as served:
        stub = stub_of(served, resources)
        assert answers_of(stub) == 1
        clients = [raw_client(served, resources) for _ in range(4)]
        served._loop.call_soon_threadsafe(may_go_on.wait, WAIT_SECONDS)
        for client in clients:
            frames = b""
            for _ in range(1000):
                call, begun = client.frames_to_begin(INFER, SMALL)
                frames += begun + client.frame_to_reset(call)
            client.send(frames)
            client.wait_handled()
        answers = [stub.ModelInfer.future(request_of(1), timeout=WAIT_SECONDS) for _ in range(20)]
        may_go_on.set()
        assert all(answer.result().model_name == "zeros" for answer in answers)
