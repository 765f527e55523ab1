"""Clients that accept no answers, send no requests, or reset calls: each loses that call, and nobody else any."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PingAckReceived, StreamEnded, StreamReset
from tritonclient.grpc import service_pb2

from bench.serving.http2 import begun, headers_of, send_part
from tests.serve.fronts import SECONDS, Fronted, serving
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.limits import Limits

MEBIBYTE = 1 << 20
INFER = f"/{INFERENCE_SERVICE}/ModelInfer"
STREAM = f"/{INFERENCE_SERVICE}/ModelStreamInfer"


class RawClient:
    """A gRPC client over HTTP/2 alone: it can ask and not accept the answer, or begin to ask and not end.

    Args:
        port: of a server on this machine.
        window_bytes: that the server may send of each call's answer, and never more.
    """

    def __init__(self, port: int, *, window_bytes: int = 1024) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._http2 = begun(window_bytes)
        self._received: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._flush()

    def begin(self, method: str, message: bytes) -> int:
        """Open a call; returns its stream."""
        stream, frames = self.frames_to_begin(method, message)
        self._socket.sendall(frames)
        return stream

    def frames_to_begin(
        self, method: str, message: bytes | None = None, *, is_whole: bool = True, length: int = -1
    ) -> tuple[int, bytes]:
        """A call's stream and frames; without a message, or if not whole, it stays half-open. ``length``: what the
        message says that it will have."""
        stream = self._http2.get_next_available_stream_id()
        self._http2.send_headers(stream, headers_of(method))
        if message is not None:
            data = memoryview(struct.pack(">BI", 0, len(message) if length < 0 else length) + message)
            while data := send_part(self._http2, stream, data, is_last=is_whole):
                self._flush()
                self._next()
        return stream, self._http2.data_to_send()

    def frame_to_reset(self, stream: int) -> bytes:
        self._http2.reset_stream(stream, ErrorCodes.CANCEL)
        return self._http2.data_to_send()

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def _flush(self) -> None:
        if frames := self._http2.data_to_send():
            self._socket.sendall(frames)

    def _next(self) -> list[Event]:
        """What comes next; settings and pings are answered. EOFError if the server has closed the connection."""
        received = self._socket.recv(1 << 16)
        if not received:
            raise EOFError
        events = self._http2.receive_data(received)
        for event in events:
            if isinstance(event, DataReceived):
                self._received[event.stream_id] = self._received.get(event.stream_id, b"") + event.data
            elif isinstance(event, StreamEnded | StreamReset):
                self._ended.add(event.stream_id)
        self._flush()
        return events

    def _wait(self, is_there: Callable[[list[Event]], bool]) -> None:
        while not is_there(self._next()):
            pass

    def wait_end(self, stream: int) -> bytes:
        """Wait until the server ends a call; the data that it sent of it. EOFError if it closes the connection."""
        if stream not in self._ended:
            self._wait(lambda _: stream in self._ended)
        return self._received.get(stream, b"")

    def wait_handled(self) -> None:
        """Wait until the server has read what was sent."""
        self._http2.ping(bytes(8))
        self._flush()
        self._wait(lambda events: any(isinstance(event, PingAckReceived) for event in events))

    def close(self) -> None:
        self._socket.close()


def request_of(size: int, model: str = "zeros") -> Any:
    """A short one, whose answer is as long as that."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="x", datatype="INT64", shape=[1])
    message.raw_input_contents.append(np.int64(size).tobytes())
    return message


LARGE, SMALL = (request_of(size).SerializeToString() for size in (4 * MEBIBYTE, 1))


def raw_client(served: Fronted, stack: ExitStack, **options: Any) -> RawClient:
    client = stack.enter_context(contextlib.closing(RawClient(served.port, **options)))
    call_nobody(client)
    return client


def call_nobody(client: RawClient) -> None:
    """gRPC's loop keeps the first call that came, and the last until there is another: that is to be one of these."""
    client.wait_end(client.begin("/nobody/Nothing", b""))


def answers_of(stub: Any, size: int = 1) -> int:
    """The size of an answer."""
    return len(stub.ModelInfer(request_of(size), timeout=SECONDS).raw_output_contents[0])


# Answers that are not accepted.


@pytest.mark.parametrize(
    ("method", "message", "window_bytes"), [(INFER, LARGE, 2), (INFER, SMALL, 0), (STREAM, LARGE, 0)]
)
def test_an_answer_that_is_not_accepted_ends_its_call_alone(
    stack: ExitStack, method: str, message: bytes, window_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving("grpc", Limits(send_seconds=0.2, stream_idle_seconds=0.2)) as served:
        client = raw_client(served, stack, window_bytes=window_bytes)
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
def test_half_open_calls_do_not_keep_others_out(stack: ExitStack, method: str) -> None:
    """Nor those whose request has come in part, though the server holds but 16 of the 600 at a time."""
    limits = Limits(calls=2)
    with serving("grpc", limits) as served:
        stub = stack.enter_context(served.stub())
        for number in range(4):
            client = raw_client(served, stack)
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


def test_calls_that_are_reset_do_not_cancel_those_of_others(stack: ExitStack) -> None:
    """gRPC has calls wait for the event loop, and by default it cancels whatever comes above 3000."""
    may_go_on = threading.Event()
    with serving("grpc") as served:
        stub = stack.enter_context(served.stub())
        assert answers_of(stub) == 1
        clients = [raw_client(served, stack) for _ in range(4)]
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
