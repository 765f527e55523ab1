"""Answers over gRPC: others are answered while a large one is encoded, and what is not accepted is bounded."""

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serve.fakes import FakeEngine
from tests.serve.grpc_harness import WAIT_SECONDS, Served, serving, wait_until
from tierstore.serve.encoding import LARGE_ELEMENTS
from tierstore.serve.grpc import codec, connections
from tierstore.serve.grpc.limits import MAX_AWAITED, RESERVED_RPCS, GrpcLimits
from tierstore.serve.grpc.messages import INFERENCE_SERVICE
from tierstore.serve.grpc.service import InferenceService

LARGE = 5 * LARGE_ELEMENTS
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
    message.inputs.add(name="x", datatype="UINT8", shape=[size])
    message.raw_input_contents.append(bytes(size))
    return message


class Held:
    """Stands where typed contents are filled in, and waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self._fill = codec.fill_contents
        monkeypatch.setattr(codec, "fill_contents", self)

    def __call__(self, *arguments: Any) -> None:
        self.began.set()
        assert self.may_go_on.wait(WAIT_SECONDS / 2), "nobody else was served"
        self._fill(*arguments)


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
    with serving(GrpcLimits(max_response_elements=LARGE)) as served:
        stub = stub_of(served)
        assert len(stub.ModelInfer(typed_request()).outputs) == 1
        assert len(stub.ModelInfer(raw_request(LARGE + 1)).raw_output_contents[0]) == LARGE + 1
        held = Held(monkeypatch)
        with pytest.raises(grpc.RpcError, match="ask with raw_input_contents") as raised:
            stub.ModelInfer(typed_request(LARGE + 1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not held.began.is_set(), "it is refused before any of it is encoded"


def test_raw_contents_are_measured_before_they_are_copied(
    stub_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(codec, "encode_response")
    with serving(GrpcLimits(max_response_bytes=MEBIBYTE)) as served:
        with pytest.raises(grpc.RpcError, match="ask for less") as raised:
            stub_of(served).ModelInfer(raw_request(MEBIBYTE + 1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# What clients do not accept.


def test_answers_that_nobody_reads_hold_places_of_inference_alone(stub_of: Callable[..., Any]) -> None:
    """As many of them as there are places for calls of any kind leave room for health."""
    with serving(GrpcLimits(max_concurrent_rpcs=2)) as served, ExitStack() as channels:
        held = [unread(served, channels, raw_request()) for _ in range(2)]
        wait_until(lambda: len(served.engine.seen) == 2, "them to be answered")
        stub = stub_of(served)
        with pytest.raises(grpc.RpcError, match="2 calls are under way"):
            stub.ModelInfer(typed_request(1), timeout=WAIT_SECONDS)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live
        for call in held:
            call.cancel()
        wait_until(lambda: succeeds(stub), "their places to be free")


def succeeds(stub: Any) -> bool:
    try:
        stub.ModelInfer(typed_request(1), timeout=WAIT_SECONDS)
    except grpc.RpcError:
        return False
    return True


def unsent_bytes(served: Served) -> int:
    return served.server._service.unsent_bytes


def test_answers_that_nobody_reads_are_bounded(stub_of: Callable[..., Any]) -> None:
    limits = GrpcLimits(max_unsent_bytes=9 * MEBIBYTE)
    with serving(limits) as served, ExitStack() as channels:
        held = [unread(served, channels, raw_request()) for _ in range(2)]
        wait_until(lambda: unsent_bytes(served) > 8 * MEBIBYTE, "two answers to be held")
        stub = stub_of(served)
        with pytest.raises(grpc.RpcError, match="yet to accept 9437184 bytes") as raised:
            stub.ModelInfer(raw_request(), timeout=WAIT_SECONDS)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert succeeds(stub), "who asks for little is answered"
        assert len(served.engine.refused) == 1
        for call in held:
            call.cancel()
        wait_until(lambda: unsent_bytes(served) == 0, "what they held to be free")


def test_a_streams_answers_that_nobody_reads_are_bounded(stub_of: Callable[..., Any]) -> None:
    go_on = threading.Event()

    def requests() -> Iterator[Any]:
        yield from [raw_request()] * 5
        go_on.wait(2 * WAIT_SECONDS)

    with serving(GrpcLimits(max_unsent_bytes=9 * MEBIBYTE)) as served:
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


class JammedContext:
    """A call whose client's socket takes nothing."""

    def __init__(self) -> None:
        self.is_aborting = asyncio.Event()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    async def abort(self, *_: Any) -> None:
        self.is_aborting.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("model", ["full", "nobody"])
def test_a_status_is_to_be_accepted_in_time_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disconnected: list[str] = []
    monkeypatch.setattr(connections, "disconnect", disconnected.append)

    async def check() -> None:
        async def requests() -> Any:
            yield service_pb2.ModelInferRequest(model_name=model).SerializeToString()

        served, context = InferenceService(FakeEngine(), GrpcLimits(send_seconds=0.01)), JammedContext()
        call = asyncio.create_task(served._model_infer(requests(), context))
        async with asyncio.timeout(WAIT_SECONDS):
            await context.is_aborting.wait()
            while not disconnected:
                await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(check())
    assert disconnected == ["ipv4:127.0.0.1:1"]


def test_disconnecting_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first time no descriptor may be left to find the connection with, as too many are open."""
    caplog.set_level(logging.WARNING)
    tried: list[str] = []

    def disconnect(peer: str) -> None:
        tried.append(peer)
        if len(tried) == 1:
            raise OSError("too many open files")

    monkeypatch.setattr(connections, "disconnect", disconnect)
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.001)

    async def check() -> None:
        disconnection = connections.Disconnection("ipv4:127.0.0.1:1", 0.001)
        async with asyncio.timeout(WAIT_SECONDS):
            while len(tried) < 2:
                await asyncio.sleep(0.001)
        disconnection.cancel()
        number = len(tried)
        await asyncio.sleep(0.02)
        assert len(tried) == number

    asyncio.run(check())
    assert caplog.text.count("accepted no answer") == 1
    assert "too many open files" in caplog.text


# Calls that ask nothing, connections that do nothing.


def test_calls_that_ask_nothing_do_not_keep_others_out(stub_of: Callable[..., Any]) -> None:
    """Anybody may ask for health: whoever never goes on to ask makes room."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(WAIT_SECONDS)
        yield from ()

    limits = GrpcLimits(max_concurrent_rpcs=2)
    with serving(limits, token="a-token") as served, grpc.insecure_channel(served.address) as channel:
        ask = channel.stream_unary(f"/{INFERENCE_SERVICE}/ServerLive")
        silent: list[Any] = []
        ended: queue.Queue[Any] = queue.Queue()
        for _ in range(limits.max_concurrent_rpcs + RESERVED_RPCS):
            silent.append(ask.future(nothing()))
            silent[-1].add_done_callback(ended.put)
        for _ in range(len(silent) - MAX_AWAITED):
            assert ended.get(timeout=WAIT_SECONDS).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        stub = stub_of(served)
        for _ in range(3):
            assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live
        assert sum(not call.done() for call in silent) > 0, "those that came last still have their time"
        for call in silent:
            call.cancel()
        over.set()


def test_room_is_made_though_the_oldest_call_is_about_to_end() -> None:
    """Its time may be up at the very moment at which another comes."""

    class Expiring:
        def expired(self) -> bool:
            return True

        def reschedule(self, _: float) -> None:
            raise RuntimeError("Cannot change state of expiring Timeout")

    async def check() -> None:
        async def requests() -> Any:
            yield b"asked"

        asked = InferenceService(FakeEngine(), GrpcLimits())
        asked._awaited.update({Expiring(): None for _ in range(MAX_AWAITED)})  # type: ignore[misc]
        with asked._awaiting() as limit:
            assert await asked._receive(requests(), limit) == b"asked"
        assert len(asked._awaited) == MAX_AWAITED - 1

    asyncio.run(check())


def test_calls_that_ask_nothing_are_calls_under_way(stub_of: Callable[..., Any]) -> None:
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait(WAIT_SECONDS)
        yield from ()

    with serving(GrpcLimits(max_concurrent_rpcs=1)) as served, grpc.insecure_channel(served.address) as channel:
        silent = channel.stream_unary(f"/{INFERENCE_SERVICE}/ModelInfer").future(nothing())
        stub = stub_of(served)
        wait_until(lambda: not succeeds(stub), "its place to be taken")
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=WAIT_SECONDS).live
        silent.cancel()
        over.set()
        wait_until(lambda: succeeds(stub), "its place to be free")


def test_connections_are_bounded() -> None:
    def connect() -> Any:
        channel = grpc.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)])
        return service_pb2_grpc.GRPCInferenceServiceStub(clients.enter_context(channel))

    def is_live(stub: Any, seconds: float = WAIT_SECONDS) -> bool:
        return bool(stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=seconds).live)

    with serving(GrpcLimits(max_connections=2)) as served, ExitStack() as clients:
        within = [connect(), connect()]
        assert all(is_live(stub) for stub in within)
        with pytest.raises(grpc.RpcError) as raised:
            is_live(connect())
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(is_live(stub) for stub in within)


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n"])
def test_who_does_not_shake_hands_is_cut_off(sent: bytes) -> None:
    with (
        serving(GrpcLimits(handshake_seconds=0.2)) as served,
        socket.create_connection(("127.0.0.1", served.port), WAIT_SECONDS) as silent,
    ):
        silent.sendall(sent)
        while silent.recv(1 << 16):  # the server speaks first
            pass
