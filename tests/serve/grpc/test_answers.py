"""Answers over gRPC: others are answered while a large one is encoded, and what is not accepted is bounded."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serve.fakes import Held
from tests.serve.grpc_harness import WAIT_SECONDS, Served, serving, wait_until
from tierstore.serve.grpc import codec
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.limits import Limits

LARGE = 20_480
MEBIBYTE = 1 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1)]
STINGY = [*UNLIMITED, ("grpc.http2.lookahead_bytes", 65535), ("grpc.http2.bdp_probe", 0)]


def typed_request(count: int = LARGE) -> Any:
    message = service_pb2.ModelInferRequest(model_name="echo")
    made = message.inputs.add(name="x", datatype="FP32", shape=[count])
    made.contents.fp32_contents.extend(np.arange(count, dtype=np.float32))
    return message


def raw_request(size: int = 4 * MEBIBYTE) -> Any:
    message = service_pb2.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="INT32", shape=[size // 4])
    message.raw_input_contents.append(bytes(size))
    return message


@pytest.fixture
def stub_of() -> Iterator[Callable[..., Any]]:
    """Makes stubs; those of stingy channels accept 64 KiB of a response that is not read, and never more."""
    with ExitStack() as channels:

        def make(served: Served, *, is_stingy: bool = False) -> Any:
            channel = grpc.insecure_channel(served.address, STINGY if is_stingy else UNLIMITED)
            return service_pb2_grpc.GRPCInferenceServiceStub(channels.enter_context(channel))

        yield make


def unread(served: Served, channels: ExitStack, message: Any) -> Any:
    """A call whose response is not read: as a stream, so that gRPC leaves it so."""
    channel = channels.enter_context(grpc.insecure_channel(served.address, STINGY))
    return channel.unary_stream(f"/{INFERENCE_SERVICE}/ModelInfer")(message.SerializeToString())


def test_others_are_answered_while_a_large_answer_is_encoded(
    stub_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with serving() as served:
        stub = stub_of(served)
        answer = stub.ModelInfer.future(typed_request(), timeout=WAIT_SECONDS)
        assert held.began.wait(WAIT_SECONDS)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live
        assert not answer.done()
        held.may_go_on.set()
        assert list(answer.result().outputs[0].contents.fp32_contents) == list(range(LARGE))


def test_typed_contents_are_bounded(stub_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Limits(elements=LARGE)) as served:
        stub = stub_of(served)
        assert len(stub.ModelInfer(typed_request()).outputs) == 1
        assert len(stub.ModelInfer(raw_request(4 * LARGE + 4)).raw_output_contents[0]) == 4 * LARGE + 4
        held = Held(monkeypatch)
        with pytest.raises(grpc.RpcError, match="ask with raw_input_contents") as raised:
            stub.ModelInfer(typed_request(LARGE + 1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not held.began.is_set(), "it is refused before any of it is encoded"


def test_raw_contents_are_measured_before_they_are_copied(
    stub_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(codec, "encode_response")
    with serving(Limits(response_bytes=MEBIBYTE)) as served:
        with pytest.raises(grpc.RpcError, match="ask for less") as raised:
            stub_of(served).ModelInfer(raw_request(MEBIBYTE + 4))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# What clients do not accept.


def succeeds(stub: Any) -> bool:
    try:
        stub.ModelInfer(typed_request(1), timeout=WAIT_SECONDS)
    except grpc.RpcError:
        return False
    return True


def unsent_bytes(served: Served) -> int:
    return served.server._service.front.unsent.held


def test_a_streams_answers_that_nobody_reads_are_bounded(stub_of: Callable[..., Any]) -> None:
    go_on = threading.Event()

    def requests() -> Iterator[Any]:
        yield from [raw_request()] * 5
        go_on.wait(2 * WAIT_SECONDS)

    with serving(Limits(responses_bytes=9 * MEBIBYTE)) as served:
        stub = stub_of(served, is_stingy=True)
        call = stub.ModelStreamInfer(requests())
        wait_until(lambda: len(served.engine.refused) == 3, "two to be held, and three refused")
        assert 8 * MEBIBYTE < unsent_bytes(served) <= 9 * MEBIBYTE
        answers = [next(call) for _ in range(5)]
        assert [bool(answer.error_message) for answer in answers] == [False, False, True, True, True]
        wait_until(lambda: unsent_bytes(served) == 0, "what was read to be free")
        go_on.set()
        assert list(call) == []


def test_a_stream_that_is_left_frees_what_it_held(
    stub_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as served:
        for _ in range(5):
            call = stub_of(served, is_stingy=True).ModelStreamInfer(iter([raw_request()] * 3))
            wait_until(lambda: unsent_bytes(served) > 12 * MEBIBYTE, "its answers to wait")
            call.cancel()
            wait_until(lambda: unsent_bytes(served) == 0, "them to be given up")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], (
        "to leave is no failure of ours"
    )


# Connections.


def test_connections_are_bounded() -> None:
    def connect() -> Any:
        channel = grpc.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)])
        return service_pb2_grpc.GRPCInferenceServiceStub(clients.enter_context(channel))

    def is_live(stub: Any, seconds: float = WAIT_SECONDS) -> bool:
        return bool(stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=seconds).live)

    with serving(Limits(connections=2)) as served, ExitStack() as clients:
        within = [connect(), connect()]
        assert all(is_live(stub) for stub in within)
        with pytest.raises(grpc.RpcError) as raised:
            is_live(connect())
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(is_live(stub) for stub in within)


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n"])
def test_who_does_not_shake_hands_is_cut_off(sent: bytes) -> None:
    with (
        serving(Limits(receive_seconds=0.2)) as served,
        socket.create_connection(("127.0.0.1", served.port), WAIT_SECONDS) as silent,
    ):
        silent.sendall(sent)
        while silent.recv(1 << 16):  # the server speaks first
            pass
