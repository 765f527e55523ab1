"""Clients that accept no answers, send no requests, or reset calls: each loses that call, and nobody else any."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.serve.fronts import SECONDS, Fronted, serving
from tests.serve.raw_http2 import RawClient
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.limits import Limits

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


def raw_client(served: Fronted, resources: ExitStack, **options: Any) -> RawClient:
    client = resources.enter_context(RawClient(served.port, timeout_seconds=SECONDS, **options))
    call_nobody(client)
    return client


def call_nobody(client: RawClient) -> None:
    """gRPC's loop keeps the first call that came, and the last until there is another: that is to be one of these."""
    client.wait_end(client.begin("/nobody/Nothing"))


def answers_of(stub: Any, size: int = 1) -> int:
    """The size of an answer."""
    return len(stub.ModelInfer(request_of(size), timeout=SECONDS).raw_output_contents[0])


# Answers that are not accepted.


@pytest.mark.parametrize(
    ("method", "message"), [(INFER, LARGE), (INFER, SMALL), (STREAM, LARGE)], ids=["large", "small", "stream"]
)
@pytest.mark.parametrize("window_bytes", [0, 2])
def test_an_answer_that_is_not_accepted_ends_its_call_alone(
    resources: ExitStack, method: str, message: bytes, window_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("grpc", Limits(send_seconds=0.2, stream_idle_seconds=0.2)) as served:
        client = raw_client(served, resources, window_bytes=window_bytes)
        calls = [client.begin(method, message) for _ in range(3)]
        served.wait_until(lambda: len(served.engine.seen) == 3, "them to be asked")
        slow = client.begin(INFER, request_of(1, "slow").SerializeToString())
        for call in calls:
            assert len(client.wait_end(call)) == window_bytes
        served.wait_sent()
        assert caplog.text.count("accepted no answer for 0.2 seconds") == 3
        client.wait_handled()
        assert not served.engine.cancelled, "a call of the same connection goes on"
        served.let_go()
        call_nobody(client)
        assert len(client.wait_end(slow)) == window_bytes


# Requests that do not come.


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_half_open_calls_do_not_keep_others_out(resources: ExitStack, method: str) -> None:
    """Nor those whose request has come in part, though the server holds but 16 of the 600 at a time."""
    limits = Limits(calls=2)
    with serving("grpc", limits) as served:
        stub = resources.enter_context(served.stub())
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
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=SECONDS).live
                [answer] = stub.ModelStreamInfer(iter([request_of(1)]), timeout=SECONDS)
                assert not answer.error_message
        assert {str(error).split(" requests are arriving")[0] for _, error in served.engine.refused} == {"16"}


# Calls that are reset.


def test_calls_that_are_reset_do_not_cancel_those_of_others(resources: ExitStack) -> None:
    """gRPC has calls wait for the event loop, and by default it cancels whatever comes above 3000."""
    may_go_on = threading.Event()
    with serving("grpc") as served:
        stub = resources.enter_context(served.stub())
        assert answers_of(stub) == 1
        clients = [raw_client(served, resources) for _ in range(4)]
        served.loop.call_soon_threadsafe(may_go_on.wait, SECONDS)
        for client in clients:
            frames = b""
            for _ in range(1000):
                call, begun = client.frames_to_begin(INFER, SMALL)
                frames += begun + client.frame_to_reset(call)
            client.send(frames)
            client.wait_handled()
        answers = [stub.ModelInfer.future(request_of(1), timeout=SECONDS) for _ in range(20)]
        may_go_on.set()
        assert all(answer.result().model_name == "zeros" for answer in answers)
