"""What REST and gRPC do alike, as the protocol's independent client sees them over real sockets."""

import asyncio
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

import tierstore
from tests.serve.fakes import VERSION, Held
from tests.serve.fronts import MODULES, PROTOCOLS, SECONDS, Fronted, ask, read_to_end, refused, serving, tensor
from tests.serve.test_requests import WAYS, valid
from tierstore.serve.limits import Limits
from tierstore.serve.messages import DATATYPES, ServeError, Status

MEBIBYTE = 1 << 20
TOKEN = "a-token"
LARGE = 20_480
"""Rows of x: so much that it is encoded in pieces, and its acceptance waited for."""


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Fronted]]:
    with ExitStack() as stack:
        yield {each: stack.enter_context(serving(each)) for each in PROTOCOLS}


@pytest.fixture
def served(running: dict[str, Fronted], protocol: str) -> Iterator[Fronted]:
    """One for the module, its engine as at first."""
    yield running[protocol].reset()
    running[protocol].reset()


@pytest.fixture
def client(served: Fronted) -> Iterator[Any]:
    with served.client() as made:
        yield made


def as_dict(answer: Any) -> Any:
    return answer if isinstance(answer, dict | list) else MessageToDict(answer, preserving_proto_field_name=True)


def begin(served: Fronted, rows: int) -> "Future[Any]":
    answer: Future[Any] = Future()

    def run() -> None:
        with served.client(network_timeout=SECONDS) if served.protocol == "http" else served.client() as client:
            try:
                answer.set_result(ask(served, client, "slow", rows))
            except Exception as error:
                answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def begun(served: Fronted, count: int, rows: int = 1) -> list["Future[Any]"]:
    answers = [begin(served, rows) for _ in range(count)]
    served.wait_until(lambda: len(served.engine.seen) == count, "the requests to arrive")
    return answers


def test_health(served, client):
    asked = [("double", ""), ("double", VERSION), ("double", "8"), ("absent", "")]

    def told() -> list[bool]:
        return [client.is_server_live(), client.is_server_ready(), *(client.is_model_ready(*each) for each in asked)]

    assert told() == [True, True, True, True, False, False]
    served.engine.is_ready = False
    assert told() == [True] + [False] * 5
    served.engine.is_live = False
    assert told() == [False] * 6


def test_metadata(served, client):
    about = as_dict(client.get_server_metadata())
    assert (about["name"], about["version"]) == ("tierstore", tierstore.__version__)
    assert "binary_tensor_data" in about["extensions"]
    about = as_dict(client.get_model_metadata("double", VERSION))
    specs = [
        (each["name"], each["datatype"], [*map(int, each["shape"])]) for each in about["inputs"] + about["outputs"]
    ]
    assert specs == [(name, "FP32", [-1, 3]) for name in "xy"]
    assert (about["name"], about["versions"], about["platform"]) == ("double", [VERSION], "tierstore")
    for state in ("READY", "UNAVAILABLE"):
        served.engine.is_ready = state == "READY"
        index = as_dict(client.get_model_repository_index())
        models = index if isinstance(index, list) else index["models"]
        names = ["broken", "double", "echo", "full", "late", "slow", "zeros"]
        assert models == [{"name": name, "version": VERSION, "state": state} for name in names]
    with refused(Status.NOT_FOUND, "'echo'"):
        client.get_model_metadata("absent")


def test_tritons_configuration(client):
    found = as_dict(client.get_model_config("double"))
    config = found.get("config", found)
    assert (config["name"], config["platform"], config["backend"]) == ("double", "tierstore", "tierstore")
    assert config.get("max_batch_size", 0) == 0
    tensors = [(each["name"], each["data_type"], [int(size) for size in each["dims"]])
               for each in config["input"] + config["output"]]  # fmt: skip
    assert tensors == [(name, "TYPE_FP32", [-1, 3]) for name in "xy"]
    assert config["parameters"] == {"features": {"string_value": "a,b"}}
    with refused(Status.NOT_FOUND):
        client.get_model_config("double", "99")


@given(valid(), st.booleans(), st.text("abc-", max_size=9))
def test_tensors_go_back_as_they_are(running, drawn, binary, request_id):
    """Of any datatype and shape, and aligned: names of every length shift what follows by single bytes."""
    for protocol, served in running.items():
        tensors = {name: (each.datatype, each.data) for name, each in WAYS["gRPC, raw"](drawn).inputs.items()}
        named = {name: each for name, each in tensors.items() if binary or each[0] != "BYTES"}
        inputs = [tensor(protocol, name, *each, binary=binary) for name, each in named.items()]
        with served.client() as client:
            result = client.infer("echo", inputs, VERSION, request_id=request_id)
        request = served.engine.seen[-1]
        expected = (protocol, VERSION, request_id, None, list(named))
        assert (request.protocol, request.version, request.id, request.deadline, list(request.inputs)) == expected
        response = as_dict(result.get_response())
        assert (response["model_version"], response.get("id", "")) == (VERSION, request_id)
        for name, (datatype, data) in named.items():
            found = request.inputs[name].data
            assert (found.dtype, found.shape) == (DATATYPES[datatype], data.shape)
            assert found.flags.c_contiguous
            assert found.flags.aligned
            assert found.tolist() == data.tolist()
            np.testing.assert_array_equal(np.array(result.as_numpy(name), data.dtype).reshape(data.shape), data)


FAILURES = {
    ("full", ""): Status.OVERLOADED,
    ("late", ""): Status.DEADLINE,
    ("broken", ""): Status.INTERNAL,
    ("absent", ""): Status.NOT_FOUND,
    ("double", "8"): Status.NOT_FOUND,
}


def test_failures(served, client):
    for (model, version), status in FAILURES.items():
        with refused(status):
            ask(served, client, model, model_version=version)
    with refused(Status.NOT_FOUND) as raised:
        client.get_model_metadata("x" * 3000)
    assert served.protocol == "http" or len(raised.value.message()) < 600, "it travels in metadata"
    served.reset()
    one = tensor(served.protocol, "the_input", "FP32", np.zeros((1, 3), np.float32))
    with refused(Status.INVALID, "the_input"):
        client.infer("echo", [one, one])
    ((protocol, error),) = served.engine.refused
    assert (protocol, type(error), served.engine.seen) == (served.protocol, ServeError, [])


def test_an_unexpected_error_tells_nothing(served, client, caplog, monkeypatch):
    async def fail(request: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(served.engine, "infer", fail)
    with refused(Status.INTERNAL) as raised:
        ask(served, client)
    assert "secret" not in str(raised.value)
    assert "secret" in caplog.text


def test_who_leaves_is_not_worked_for(served):
    with ExitStack() as stack:
        if served.protocol == "http":
            body = b'{"inputs":[]}'
            head = b"POST /v2/models/slow/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
            stack.enter_context(served.connect()).sendall(2 * (head + body))  # the second is never begun
        else:
            stub = stack.enter_context(served.stub())
            call = stub.ModelInfer.future(service_pb2.ModelInferRequest(model_name="slow"))
            stack.callback(call.cancel)
        served.wait_until(lambda: served.engine.seen, "the request to arrive")
        assert not served.engine.cancelled
    served.wait_until(lambda: served.engine.cancelled == served.engine.seen, "the engine to be told")
    served.wait_free()
    assert len(served.engine.seen) == 1


def test_stop_lets_requests_end(protocol):
    with serving(protocol) as served:
        idle = served.connect() if protocol == "http" else contextlib.nullcontext()
        answers = begun(served, 2)
        stopping = asyncio.run_coroutine_threadsafe(served.server.stop(SECONDS), served.loop)
        with idle:
            assert protocol == "grpc" or idle.recv(1) == b"", "a connection without a request is closed at once"

        def is_refused() -> bool:
            with contextlib.suppress(ConnectionError), served.connect():
                return False
            return True

        served.wait_until(is_refused)
        assert not stopping.done()
        served.let_go()
        for each in answers:
            assert each.result(SECONDS).as_numpy("x").shape == (1, 3)
        stopping.result(SECONDS)


def test_stop_cuts_off_what_does_not_end_and_frees_the_port(protocol):
    with serving(protocol) as served:
        (answer,) = begun(served, 1)
        served.call(served.server.stop(0.01))
        assert answer.exception(SECONDS)
        served.wait_until(lambda: served.engine.cancelled == served.engine.seen, "the engine to be told")
        served.call(served.server.stop(1))
    with serving(protocol, port=served.port) as again:
        assert again.port == served.port


def test_requests_that_are_too_large(protocol):
    """Compressed by gRPC, a thousandth of it is on the wire: what counts is its size in memory."""
    with serving(protocol, Limits(body_bytes=MEBIBYTE, bodies_bytes=2 * MEBIBYTE)) as served, served.client() as client:
        for options in ({}, {"compression_algorithm": "gzip"} if protocol == "grpc" else {}):
            ask(served, client, "double", 80_000, **options)
            with refused(Status.TOO_LARGE):
                ask(served, client, "double", 200_000, **options)
        assert len(served.engine.seen) == 2
        served.engine.seen.clear()
        held = begun(served, 2, 80_000)
        with refused(Status.OVERLOADED, "try again"):
            ask(served, client, "echo", 80_000)
        ask(served, client)
        served.let_go()
        for each in held:
            assert each.result(SECONDS).as_numpy("x").shape == (80_000, 3)


def slow_elements(served: Fronted, count: int) -> Any:
    if served.protocol == "http":
        with served.client(network_timeout=SECONDS) as client:
            x = tensor("http", "x", "FP32", np.arange(count, dtype=np.float32))
            outputs = [MODULES["http"].InferRequestedOutput("x", binary_data=False)]
            return client.infer("echo", [x], outputs=outputs).as_numpy("x").tolist()
    message = service_pb2.ModelInferRequest(model_name="echo")
    made = message.inputs.add(name="x", datatype="FP32", shape=[count])
    made.contents.fp32_contents.extend(np.arange(count, dtype=np.float32))
    with served.stub() as stub:
        return list(stub.ModelInfer(message, timeout=SECONDS).outputs[0].contents.fp32_contents)


def test_others_are_answered_while_a_large_answer_is_encoded(served, client, monkeypatch):
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(slow_elements, served, LARGE)
        assert held.began.wait(SECONDS)
        assert client.is_server_live()
        assert served.front.unsent.held == 4 * LARGE
        assert not answer.done()
        held.may_go_on.set()
        assert answer.result(SECONDS) == list(range(LARGE))
    served.wait_sent()


def test_numbers_encoded_one_by_one_are_bounded(protocol):
    with serving(protocol, Limits(elements=LARGE)) as served, served.client() as client:
        assert len(slow_elements(served, LARGE)) == LARGE
        ask(served, client, "echo", LARGE)
        with pytest.raises(Exception, match=r"binary data|raw_input_contents"):
            slow_elements(served, LARGE + 1)
        assert served.engine.refused[-1][1].status is Status.TOO_LARGE


def test_connections_are_bounded(protocol):
    with serving(protocol, Limits(connections=2)) as served, ExitStack() as opened:

        def is_live() -> bool:
            if protocol == "grpc":
                stub = opened.enter_context(served.stub())
                return bool(stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=SECONDS).live)
            return bool(opened.enter_context(served.client()).is_server_live())

        assert is_live()
        assert is_live()
        if protocol == "http":
            assert not is_live()
            assert served.refused[-1].status is Status.OVERLOADED
        else:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                is_live()
        opened.close()
        served.wait_free()


NO_TOKENS = [None, TOKEN, f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]


def test_tokens(protocol):
    with serving(protocol, token=TOKEN) as served, served.client() as client:
        if protocol == "http":
            twice = [("authorization", f"Bearer {each}") for each in (TOKEN, "another")]
            assert httpx.get(f"http://{served.address}/v2", headers=twice, trust_env=False).status_code == 401
            served.reset()
        for shown in NO_TOKENS:
            headers = {} if shown is None else {"authorization": shown}
            for call in (
                lambda headers=headers: ask(served, client, "echo", headers=headers),
                lambda headers=headers: client.get_model_metadata("absent", headers=headers),
            ):
                with refused(Status.UNAUTHENTICATED) as raised:
                    call()
                assert TOKEN not in str(raised.value)
        assert client.is_server_live()
        assert client.is_server_ready()
        assert not served.engine.seen
        assert [error.status for _, error in served.engine.refused] == [Status.UNAUTHENTICATED] * 2 * len(NO_TOKENS)
        for shown in (f"Bearer {TOKEN}", f"bearer  {TOKEN}"):
            assert ask(served, client, "echo", headers={"authorization": shown}).as_numpy("x").shape == (1, 3)


@pytest.mark.parametrize(
    ("use_tls", "sent"), [(False, b""), (False, b"PRI * HTTP/2.0\r\n"), (True, b""), (True, b"\x16\x03\x01\x02\x00")]
)
def test_who_does_not_shake_hands_is_cut_off(protocol, tls, use_tls, sent):
    limits = Limits(receive_seconds=0.2, idle_seconds=0.2)
    with serving(protocol, limits, tls=tls if use_tls else None) as served, served.connect() as silent:
        silent.sendall(sent)
        try:
            while silent.recv(1 << 16):  # gRPC speaks first
                pass
        except ConnectionError:
            pass
        served.wait_free()


def test_tls_and_its_handshakes_which_are_bounded_as_connections_are(protocol, tls):
    """Of REST twice as many may be open, as those beyond the limit are told so."""
    trust = ssl.create_default_context(cafile=tls.certificate)
    with serving(protocol, Limits(connections=2), tls=tls, use_uvloop=True) as served, ExitStack() as opened:
        silent, end = [opened.enter_context(served.connect()) for _ in range(12)], time.monotonic() + SECONDS
        while len(silent) > (4 if protocol == "http" else 2):
            assert time.monotonic() < end, f"{len(silent)} are open"
            closed = select.select(silent, [], [], 0.1)[0]
            silent = [each for each in silent if each not in closed]
        opened.close()
        served.wait_free()
        if protocol == "http":
            assert httpx.get(f"https://{served.address}/v2", verify=trust, trust_env=False).status_code == 200
            with served.connect() as sock:
                sock.sendall(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
                assert b"HTTP" not in read_to_end(sock)
            return
        with served.client(ssl=True, root_certificates=str(tls.certificate)) as client:
            assert ask(served, client).as_numpy("y").shape == (1, 3)
        with served.client() as client, refused(Status.UNAVAILABLE):
            client.is_server_live(client_timeout=SECONDS)


def test_ports(protocol):
    with serving(protocol, reuse_port=True) as first:
        said = pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1.*{first.port}")
        with said, serving(protocol, port=first.port):
            pass
        with serving(protocol, reuse_port=True, port=first.port) as second:
            assert second.port == first.port
            for _ in range(20):
                with first.client() as client:
                    ask(first, client)
            assert len(first.engine.seen) + len(second.engine.seen) == 20
    with contextlib.suppress(OSError), serving("http", host="::") as served:  # there may be no IPv6
        for host in ("::1", "127.0.0.1"):
            with socket.create_connection((host, served.port), SECONDS) as sock:
                sock.sendall(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
                assert sock.recv(1)
