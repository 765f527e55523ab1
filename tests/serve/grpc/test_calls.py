"""What only gRPC has: its own health check, typed contents, and clients that are hostile below messages."""

import contextlib
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PingAckReceived, StreamEnded, StreamReset
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from bench.serving.http2 import begun, headers_of, send_part
from tests.serve.fronts import SECONDS, Fronted, ask, refused, serving, tensor
from tests.serve.test_requests import Drawn, Tensor, decode, grpc_message, valid
from tierstore.serve.grpc import codec
from tierstore.serve.grpc.codec import INFERENCE_SERVICE, MESSAGES, split_field
from tierstore.serve.grpc.server import _options
from tierstore.serve.limits import Limits
from tierstore.serve.messages import ServeError, Status

X = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
MEBIBYTE = 1 << 20
INFER = f"/{INFERENCE_SERVICE}/ModelInfer"


@pytest.fixture(scope="module")
def running() -> Iterator[Fronted]:
    with serving("grpc") as made:
        yield made


@pytest.fixture
def served(running: Fronted) -> Iterator[Fronted]:
    yield running.reset()
    running.reset()


def test_health_service_of_grpc(served):
    with served.channel() as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        name = INFERENCE_SERVICE.encode()
        for request in (b"", bytes([10, len(name)]) + name):
            assert check(request, timeout=SECONDS) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as raised:
            check(b"\x0a\x01x", timeout=SECONDS)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        served.engine.is_ready = False
        assert check(b"", timeout=SECONDS) == b"\x08\x02"
    with serving("grpc", token="a") as wary, wary.channel() as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SECONDS) == b"\x08\x01"


NO_REQUESTS = [
    *((method, [b""], "UNIMPLEMENTED") for method in ("TraceSetting", "ModelStreamInfer")),
    *((method, [b"\xff\xff"], "INVALID_ARGUMENT") for method in ("ModelMetadata", "ServerLive", "ModelInfer")),
    ("ModelInfer", [], "INVALID_ARGUMENT"),
]


def test_calls_that_are_no_request(served):
    with served.channel() as channel:
        for method, requests, code in NO_REQUESTS:
            call = channel.stream_stream(f"/{INFERENCE_SERVICE}/{method}")(iter(requests), timeout=SECONDS)
            assert call.code().name == code, method
    assert [protocol for protocol, _ in served.engine.refused] == ["grpc"] * 2


def test_a_request_that_does_not_come_is_not_waited_for():
    go_on = threading.Event()

    def requests() -> Iterator[Any]:
        go_on.wait(SECONDS)
        yield b""

    with serving("grpc", Limits(receive_seconds=0.2)) as served, served.channel() as channel:
        assert channel.stream_stream(INFER)(requests(), timeout=SECONDS).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        go_on.set()
        assert len(served.engine.refused) == 1


def test_deadlines_of_the_call_and_of_the_request(served):
    with served.client() as client:
        ask(served, client, client_timeout=500)
        ask(served, client, client_timeout=500, timeout=100_000_000)
        by_call, sooner = (request.deadline for request in served.engine.seen)
        assert by_call - sooner > 300
        with refused(Status.DEADLINE):
            ask(served, client, "slow", client_timeout=0.05)
    # Either the call is cancelled while the engine holds it, or it came too late to be begun.
    served.wait_until(lambda: len(served.engine.cancelled) == len(served.engine.seen) - 2)


def test_large_answers_are_refused(monkeypatch):
    with serving("grpc", Limits(response_bytes=MEBIBYTE)) as served, served.client() as client:
        assert ask(served, client, "echo", 80_000).as_numpy("x").shape == (80_000, 3)
        monkeypatch.delattr(codec, "encode_response")  # raw ones are measured before they are copied
        with refused(Status.TOO_LARGE, "ask for less"):
            ask(served, client, "echo", 100_000)


def test_calls_are_bounded():
    with serving("grpc", Limits(calls=1)) as served, served.client() as client:
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer("slow", [tensor("grpc", "x", "FP32", X)], callback=lambda result, error: answers.put(error))
        served.wait_until(lambda: served.engine.seen)
        with refused(Status.OVERLOADED, "1 calls"):
            ask(served, client)
        assert client.is_server_ready(), "health is answered all the same"
        served.let_go()
        assert answers.get(timeout=SECONDS) is None
        ask(served, client)
        assert [protocol for protocol, _ in served.engine.refused] == ["grpc"]


def test_answers_that_nobody_reads_are_bounded(stack):
    with serving("grpc", Limits(responses_bytes=9 * MEBIBYTE)) as served:
        client = raw_client(served, stack, window_bytes=0)
        calls = [client.begin(INFER, LARGE) for _ in range(5)]
        for call in calls[2:]:
            assert client.wait_end(call) == b""
        assert [error.status for _, error in served.engine.refused] == [Status.OVERLOADED] * 3
        assert 8 * MEBIBYTE <= served.front.unsent.held <= 9 * MEBIBYTE
        client.close()
        served.wait_free()


def test_grpc_has_all_options_that_are_set():
    """Options are names, and a name that it does not know is ignored without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in _options(Limits(), reuse_port=True) if name.encode() + b"\0" not in library] == []


ONE = Drawn([Tensor("the_input", "INT64", [1], [7])])


def test_messages_that_do_not_agree_with_themselves():
    messages = [grpc_message(ONE, raw=False) for _ in range(3)]
    messages[0].inputs[0].contents.int_contents.append(1)
    messages[1].raw_input_contents.append(bytes(8))
    messages[2].parameters["timeout"].SetInParent()
    messages.append(service_pb2.ModelInferRequest(raw_input_contents=[b""]))
    says = ("input 'the_input': int_contents", "input 'the_input': contents", "timeout", "raw_input_contents for 0")
    for message, each in zip(messages, says, strict=True):
        with pytest.raises(ServeError, match=each) as raised:
            decode(message)
        assert raised.value.status is Status.INVALID


def test_numbers_of_elements_handled_one_by_one_and_of_fields_are_bounded(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ELEMENTS", 3)
    for count, raw in ((3, False), (4, True)):
        drawn = Drawn([Tensor("x", "FP32", [count], [1] * count)])
        assert decode(grpc_message(drawn, raw=raw)).inputs["x"].data.shape == (count,)
    with pytest.raises(ServeError, match="raw_input_contents") as raised:
        decode(grpc_message(drawn, raw=False))
    assert raised.value.status is Status.TOO_LARGE
    monkeypatch.setattr(codec, "MAX_FIELDS", 4)
    assert len(split_field(b"\x3a\0" * 4, 7)[1]) == 4
    with pytest.raises(ServeError, match="more than 4 fields"):
        split_field(b"\x3a\0" * 5, 7)


@given(st.binary(max_size=60) | valid().map(lambda drawn: grpc_message(drawn, raw=True).SerializeToString()))
def test_splitting_reads_what_protobuf_reads(data):
    try:
        rest, raws = split_field(data, 7)
        split = service_pb2.ModelInferRequest.FromString(rest)
    except (ServeError, DecodeError):
        return
    split.raw_input_contents.extend(bytes(raw) for raw in raws)
    assert split == service_pb2.ModelInferRequest.FromString(data)


class RawClient:
    """A gRPC client over HTTP/2 alone: it can ask and not accept the answer, or begin to ask and not end.
    ``window_bytes``: that the server may send of each call's answer, and never more."""

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


@pytest.mark.parametrize(("message", "window_bytes"), [(LARGE, 2), (SMALL, 0)])
def test_an_answer_that_is_not_accepted_ends_its_call_alone(stack, message, window_bytes, caplog):
    with serving("grpc", Limits(send_seconds=0.2)) as served:
        client = raw_client(served, stack, window_bytes=window_bytes)
        calls = [client.begin(INFER, message) for _ in range(3)]
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


@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
def test_half_open_calls_do_not_keep_others_out(stack, method):
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
            for _ in range(5):
                assert answers_of(stub) == 1
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=SECONDS).live
        assert {str(error).split(" requests are arriving")[0] for _, error in served.engine.refused} == {"16"}


# Of these we describe what we send.
PARTS = {"ModelConfig", "ModelInput", "ModelOutput", "ModelParameter"}


def fields(message: Any) -> set[tuple[Any, ...]]:
    return {
        (each.number, each.name, each.label, {each.TYPE_ENUM: each.TYPE_INT32}.get(each.type, each.type),
         each.message_type and each.message_type.full_name, each.containing_oneof and each.containing_oneof.name)
        for each in message.fields
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:label:DeprecationWarning")
def test_fields_are_those_of_the_proto_files_and_tritons():
    tops = [each.DESCRIPTOR for each in MESSAGES.values()]
    described = [each for own in tops for each in (own, *own.nested_types)]
    numbers = [(each.name, each.number) for own in described if not own.GetOptions().map_entry for each in own.fields]
    texts = [path.read_text() for path in Path(codec.__file__).parent.glob("*.proto")]
    found = [(name, int(number)) for text in texts for name, number in re.findall(r"(\w+) = (\d+);", text)]
    assert sorted(numbers) == sorted(found)
    for own in described:
        if own.file.package == "inference":
            theirs = fields(service_pb2.DESCRIPTOR.pool.FindMessageTypeByName(own.full_name))
            assert fields(own) == theirs or (own.name in PARTS and fields(own) < theirs), own.name


def test_calls_that_are_reset_do_not_cancel_those_of_others(stack):
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
