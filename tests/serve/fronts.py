"""REST and gRPC over the fake engine, each in a thread with an event loop of its own, and what speaks to them."""

import asyncio
import http.client
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import uvloop
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.serve.fakes import FakeEngine
from tests.serve.loops import LoopThread
from tierstore.serve.credentials import Tls
from tierstore.serve.grpc.server import GrpcServer
from tierstore.serve.limits import Limits
from tierstore.serve.messages import Status
from tierstore.serve.rest.app import RestApp
from tierstore.serve.rest.server import HttpServer, listen

PROTOCOLS = ("http", "grpc")
SECONDS = 20.0
"""Bound of every wait in these tests."""
MODULES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


class Fronted(LoopThread):
    """Attributes:
    engine: what is served; its attributes may be read from any thread.
    server, front: of the protocol.
    refused: connections that were refused before a request was read; of REST alone.
    app: of REST, in place of the engine's.
    """

    def __init__(
        self, protocol: str, limits: Limits | None = None, *, use_uvloop: bool = False, token: str | None = None,
        tls: Tls | None = None, app: Any = None, **address: Any,
    ) -> None:  # fmt: skip
        self.protocol, self._app = protocol, app
        self.engine = FakeEngine()
        self.refused: list[Any] = []
        super().__init__(uvloop.new_event_loop() if use_uvloop else None)
        try:
            self.port: int = self.call(self._start(limits, token, tls, address))
        except BaseException:
            self.end_loop()
            raise
        self.address = f"{'localhost' if tls else '127.0.0.1'}:{self.port}"
        self.url = f"http://{self.address}"

    async def _start(self, limits: Limits | None, token: str | None, tls: Tls | None, address: dict[str, Any]) -> int:
        self.server: Any
        if self.protocol == "grpc":
            self.server = GrpcServer(self.engine, limits, token=token, tls=tls, **address)
            self.front = self.server._service.front
            return int(await self.server.start())
        app: Any = self._app or RestApp(self.engine, limits=limits, token=token)
        self.front = getattr(app, "front", None)
        self.server = HttpServer(app, limits=limits, tls=tls, on_refused=self.refused.append)
        host, port = address.pop("host", "127.0.0.1"), address.pop("port", 0)
        return int(await self.server.start(listen(host, port, **address)))

    def wait_until(self, condition: Callable[[], object], what: str = "") -> None:
        """AssertionError if it does not come true, seen from the server's loop, within ``SECONDS``."""

        async def poll() -> None:
            try:
                async with asyncio.timeout(SECONDS - 1):
                    while not condition():
                        await asyncio.sleep(0.002)
            except TimeoutError:
                raise AssertionError(f"waited for {what or condition}") from None

        self.call(poll())

    def wait_free(self) -> None:
        """Until no request, answer or REST connection is held."""
        self.wait_sent()
        self.wait_until(lambda: self.front.requests.held == 0)
        self.wait_until(lambda: getattr(self.server, "num_connections", 0) == 0)

    def wait_sent(self) -> None:
        """Until no answer is held."""
        self.wait_until(lambda: self.front.unsent.held == 0, "what they held to be free")

    def let_go(self) -> None:
        """Let the model "slow" answer."""
        self.loop.call_soon_threadsafe(self.engine.let_go.set)

    def reset(self) -> "Fronted":

        async def clear() -> None:
            self.engine.let_go.clear()
            self.engine.is_live = self.engine.is_ready = True
            for each in (self.engine.seen, self.engine.refused, self.engine.cancelled, self.refused):
                each.clear()

        self.call(clear())
        return self

    def client(self, **options: Any) -> Any:
        """Triton's."""
        return MODULES[self.protocol].InferenceServerClient(self.address, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    @contextmanager
    def channel(self, *options: tuple[str, Any]) -> Iterator[Any]:
        """Of gRPC, with a connection of its own and without bounds of the client."""
        own = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.address, [*own, *options]) as channel:
            yield channel

    @contextmanager
    def stub(self, *options: tuple[str, Any]) -> Iterator[Any]:
        with self.channel(*options) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def close(self) -> None:
        if self.loop.is_closed():
            return

        async def stop() -> None:
            await self.server.stop(0 if self._app else 0.2)
            await asyncio.sleep(0.005)  # for transports that were aborted to be closed
            if ending := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(ending, timeout=SECONDS)

        with suppress(TimeoutError):
            self.call(stop())
        self.end_loop()


@contextmanager
def serving(protocol: str, limits: Limits | None = None, **options: Any) -> Iterator[Fronted]:
    served = Fronted(protocol, limits, **options)
    try:
        yield served
    finally:
        served.close()


def tensor(protocol: str, name: str, datatype: str, data: np.ndarray, *, binary: bool = True) -> Any:
    made = MODULES[protocol].InferInput(name, list(data.shape), datatype)
    return made.set_data_from_numpy(data, **({"binary_data": binary} if protocol == "http" else {}))


def ask(served: Fronted, client: Any, model: str = "double", rows: int = 1, **options: Any) -> Any:
    x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    return client.infer(model, [tensor(served.protocol, "x", "FP32", x)], **options)


@contextmanager
def refused(status: Status, says: str = "") -> Iterator[Any]:
    with pytest.raises(InferenceServerException) as raised:
        yield raised
    assert raised.value.status() in (str(status.http), f"StatusCode.{status.grpc}")
    assert says in str(raised.value)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def read_answer(sock: socket.socket) -> Answer:
    """The next response of a connection on which no other follows it; OSError if none comes."""
    with http.client.HTTPResponse(sock) as response:
        response.begin()
        return Answer(response.status, response.headers, response.read())


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset ends it too."""
    data = b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data
