"""The Open Inference Protocol over gRPC, answered by an engine in the event loop that starts the server; and gRPC's own
health check."""

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias

import grpc

from ...system.processes import address
from ..credentials import Tls
from ..limits import Budget, Limits
from ..messages import InferResponse, ServeError, Status
from ..repository import DATA_TYPES, SERVER, Front, Repository
from . import codec
from .codec import HEALTH_SERVICE, INFERENCE_SERVICE, MESSAGES

_log = logging.getLogger(__name__)

_MAKER: Final = "_schedule_rpc_coro"
"""What runs in gRPC's task that makes the one of a handler. Its variables are in an object that it refers to."""
_makers: Final[weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.ref[asyncio.Task[Any]]]] = (
    weakref.WeakKeyDictionary()
)
"""Of the handlers' tasks that there were when one was last looked for. Tasks that note their own maker would cost each
call more, and few calls are ended here."""


def _maker_of(task: asyncio.Task[Any]) -> asyncio.Task[Any] | None:
    """gRPC's task that made a handler's; None if this gRPC has none. All are looked for at once."""
    if task not in _makers:
        for maker in asyncio.all_tasks():
            coroutine = maker.get_coro()
            if getattr(coroutine, "__qualname__", "") == _MAKER:
                for each in gc.get_referents(*gc.get_referents(coroutine)):
                    if isinstance(each, asyncio.Task):
                        _makers[each] = weakref.ref(maker)
    found = _makers.get(task)
    return None if found is None else found()


class Call:
    """The call in flight whose handler is running. Refers to it weakly: it is not to last for that.

    gRPC offers a server no way to end a call: a status waits behind the data, and the task that sends, when cancelled,
    leaves the call as it is. But gRPC cancels a call that nothing refers to, and frees what it holds. Two tasks refer
    to a call: its handler's, and that task's maker, which waits for the call's end. Both are cancelled here. Other
    calls of the connection are not touched.
    """

    def __init__(self, context: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._peer: str = context.peer()
        self._task = weakref.ref(task)

    def when_over(self, then: Callable[[], object]) -> None:
        """Have something done once the call's task ends, which goes on to send the response."""
        task = self._task()
        assert task is not None
        task.add_done_callback(lambda _: then())

    def bound_sending(self, seconds: float) -> None:
        """End the call then, for server and client, unless it is over."""
        self.when_over(asyncio.get_running_loop().call_later(seconds, self._end, seconds).cancel)

    def _end(self, seconds: float) -> None:
        task = self._task()
        if task is None:
            return
        _log.warning("%s accepted no answer for %g seconds: its call is ended", self._peer, seconds)
        maker = _maker_of(task)
        if maker is not None:
            maker.cancel()
        else:
            _log.warning("a call of %s cannot be ended with this version of gRPC", self._peer)
        task.cancel()


_FRESH_SECONDS: Final = 0.02
"""For which nobody loses a place: a short message, which comes with its call, is there by then."""
_KEPT_SHARE: Final = 8
"""One place of so many is for connections that have none."""


class _Place:
    def __init__(self, peer: str, timer: asyncio.Timeout) -> None:
        self.peer = peer
        self.timer = timer
        self.since = time.monotonic()
        self.is_lost = False


class Arrivals:
    """Places for calls whose next message is on its way: who receives.

    gRPC keeps what has come of a message, up to the longest that is taken, and does not tell how much that is: so a
    place counts as twice that long, as gRPC takes more. It keeps little of a call that is not read from
    (``grpc.http2.lookahead_bytes``).

    A call that finds no place takes the oldest of the connection that has most, unless its own has as many; else it
    waits. So a client that sends messages in part keeps only its own calls out. Some places are kept for connections
    without any.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: dict[str, dict[_Place, None]] = {}  # by connection; oldest first
        self._num_held = 0
        self._waiting: dict[asyncio.Future[None], str] = {}  # the connection of each, in the order of their coming

    async def receive(self, read: Callable[[], Awaitable[Any]], peer: str, seconds: float) -> Any:
        """What ``read`` gives of a connection. ServeError DEADLINE; OVERLOADED: it lost its place."""
        place: _Place | None = None
        try:
            async with asyncio.timeout(seconds) as timer:
                if self._is_full(peer):
                    await self._wait(peer)
                place = _Place(peer, timer)
                self._held.setdefault(peer, {})[place] = None
                self._num_held += 1
                return await read()
        except TimeoutError:
            if place is not None and place.is_lost:
                message = f"{self._places} requests are arriving, and the oldest gives way; try again later"
                raise ServeError(Status.OVERLOADED, message) from None
            raise ServeError(Status.DEADLINE, f"the request did not come within {seconds:g} seconds") from None
        finally:
            if place is not None:
                self._leave(place)

    def _leave(self, place: _Place) -> None:
        held = self._held.get(place.peer, {})
        if place in held:
            del held[place]
            self._num_held -= 1
            if not held:
                del self._held[place.peer]
            self._wake()

    def _is_full(self, peer: str) -> bool:
        kept = self._places // _KEPT_SHARE if peer in self._held else 0
        return self._num_held >= self._places - kept

    def _wake(self) -> None:
        for woken, peer in self._waiting.items():
            if not (woken.done() or self._is_full(peer)):
                del self._waiting[woken]
                woken.set_result(None)
                return

    async def _wait(self, peer: str) -> None:
        while self._is_full(peer):
            busiest = max(self._held.values(), key=len)
            seconds = None
            if len(busiest) > len(self._held.get(peer, ())) + 1:
                oldest = next(iter(busiest))
                seconds = oldest.since + _FRESH_SECONDS - time.monotonic()
                if seconds <= 0:
                    oldest.is_lost = True
                    oldest.timer.reschedule(0)
                    self._leave(oldest)
                    continue
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[woken] = peer
            try:
                async with asyncio.timeout(seconds):
                    await woken
            except TimeoutError:
                pass
            except BaseException:
                if not woken.cancelled():
                    self._wake()
                raise
            finally:
                self._waiting.pop(woken, None)


_MAX_DETAIL_CHARACTERS: Final = 512
"""A status message travels in metadata, which clients bound at 8 KiB, with up to 12 bytes for a character."""
_LEAST_ARRIVALS: Final = 16
"""Requests that may be arriving, however long they may be."""
_TAKEN_BYTES: Final = 2
"""Of memory that gRPC takes for each byte of the messages that may be arriving, with what it has of others, and gives
back later: 1.3 to 1.8, measured."""
_SERVING, _NOT_SERVING = 1, 2
_Fields: TypeAlias = Mapping[str, Any]


class InferenceService:
    """Answers every call; what it cannot answer is a status with the error's message, and never a traceback."""

    def __init__(self, engine: Repository, limits: Limits, token: str | None = None) -> None:
        self._engine = engine
        self.front = Front(engine, "grpc", limits, token)
        self._arrivals = Arrivals(max(_LEAST_ARRIVALS, limits.bodies_bytes // (_TAKEN_BYTES * limits.body_bytes)))
        self._calls = Budget(limits.calls, "{} calls are under way")

    def handlers(self) -> tuple[Any, ...]:
        """For ``add_generic_rpc_handlers``. Calls take and give bytes: a malformed message then has a status of
        ours. They are declared as of many requests: gRPC then leaves it to us how long to wait for one."""
        engine, asked = self._engine, self._asked
        methods = {
            "ServerLive": asked("ServerLive", lambda _: {"live": engine.is_live}, is_open=True),
            "ServerReady": asked("ServerReady", lambda _: {"ready": engine.is_ready}, is_open=True),
            "ServerMetadata": asked("ServerMetadata", lambda _: SERVER),
            "ModelReady": asked("ModelReady", self._model_ready),
            "ModelMetadata": asked("ModelMetadata", self._model_metadata),
            "ModelConfig": asked("ModelConfig", self._model_config),
            "RepositoryIndex": asked("RepositoryIndex", self._repository_index),
            "ModelInfer": self._handler(self._model_infer),
        }
        health = {"Check": asked("HealthCheck", self._check, is_open=True)}
        return (
            grpc.method_handlers_generic_handler(INFERENCE_SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
        )

    # Calls

    def _asked(self, name: str, answer: Callable[[Any], _Fields], *, is_open: bool = False) -> Any:
        """A handler of requests of that name, whose response has the fields that ``answer`` gives."""

        async def respond(context: Any, _: Call) -> bytes:
            fields = answer(codec.parse(f"{name}Request", await self._receive(context)))
            return bytes(MESSAGES[f"{name}Response"](**fields).SerializeToString())

        return self._handler(respond, is_open=is_open)

    def _handler(self, respond: Callable[[Any, Call], Awaitable[bytes]], *, is_open: bool = False) -> Any:
        """Answers with what ``respond`` gives, or with the status of what went wrong."""

        async def handle(_: Any, context: Any) -> bytes | None:
            call = Call(context)
            response: bytes | None = None
            failure: ServeError | None = None
            try:
                if not is_open and self.front.wants_token:
                    shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
                    self.front.require_token(shown, "this server wants metadata 'authorization: Bearer TOKEN'")
                response = await respond(context, call)
            except ServeError as error:
                failure = error
            except Exception:
                _log.exception("a call failed in the server")
                failure = ServeError(Status.INTERNAL, "internal error; the server's log has the cause")
            call.bound_sending(self.front.limits.send_seconds)
            if failure is not None:
                text = str(failure)
                text = text if len(text) <= _MAX_DETAIL_CHARACTERS else text[:_MAX_DETAIL_CHARACTERS] + "..."
                await context.abort(grpc.StatusCode[failure.status.grpc], text)
            return response

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _receive(self, context: Any) -> bytes:
        """The request of a call."""
        with self.front.noting_refusals():
            message = await self._arrivals.receive(context.read, context.peer(), self.front.limits.receive_seconds)
            if message is grpc.aio.EOF:
                raise ServeError(Status.INVALID, "the call ended without a request")
            return bytes(message)

    # Health and metadata

    def _model_ready(self, message: Any) -> dict[str, Any]:
        """A model that is not there is not ready; it is no error to ask."""
        try:
            return {"ready": self._engine.is_model_ready(message.name, message.version)}
        except ServeError:
            return {"ready": False}

    def _check(self, message: Any) -> dict[str, Any]:
        if message.service not in ("", INFERENCE_SERVICE):
            raise ServeError(Status.NOT_FOUND, f"the services are '' and {INFERENCE_SERVICE!r}")
        return {"status": _SERVING if self._engine.is_live and self._engine.is_ready else _NOT_SERVING}

    def _model_metadata(self, message: Any) -> dict[str, Any]:
        described = asdict(self._engine.model(message.name, message.version))
        del described["parameters"]  # for which there is no field
        return described

    def _model_config(self, message: Any) -> dict[str, Any]:
        config = self.front.config(message.name, message.version)
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
        parameters = config.pop("parameters")  # a map of messages takes no dicts
        made = MESSAGES["ModelConfig"](**config)
        for name, value in parameters.items():
            made.parameters[name].string_value = value["string_value"]
        return {"config": made}

    def _repository_index(self, message: Any) -> dict[str, Any]:
        return {"models": [each for each in self._engine.index() if each["state"] == "READY" or not message.ready]}

    # Inference

    async def _model_infer(self, context: Any, call: Call) -> bytes:
        data = await self._receive(context)
        with self.front.noting_refusals():
            place = self._calls.hold(1)
        with place:
            with self.front.noting_refusals():
                raw_request = codec.read_request(data)
                held = self.front.hold_request(raw_request.message.model_name)
            with held:
                with self.front.noting_refusals(raw_request.message.id):
                    held.grow(len(data))
                    request = codec.decode_request(
                        raw_request, seconds_left=context.time_remaining(), client=context.peer()
                    )
                response = await self._engine.infer(request)
                with self.front.noting_refusals(request.id):
                    return await self._encode(response, bool(raw_request.raws), call)

    async def _encode(self, response: InferResponse, is_raw: bool, call: Call) -> bytes:
        tensors = response.outputs.values()
        size = sum(tensor.data.nbytes for tensor in tensors)
        if is_raw:
            self._require_size(size)
        else:
            way_out = "ask with raw_input_contents, and it comes raw"
            self.front.require_few(sum(tensor.data.size for tensor in tensors), "typed contents", way_out)
        with self.front.hold_unsent(size):
            encoded = await codec.encode_response(response, is_raw=is_raw)
            self._require_size(len(encoded))
        hold = self.front.hold_unsent(len(encoded))
        if hold.size:
            call.when_over(hold.release)
        return encoded

    def _require_size(self, size: int) -> None:
        limit = self.front.limits.response_bytes
        if size > limit:
            raise ServeError(Status.TOO_LARGE, f"the response has {size} bytes, over {limit}; ask for less at once")


_OTHER_CALLS: Final = 1 << 12
"""Besides inference: those whose request has yet to come or whose answer to be accepted, and those about metadata. Each
has its time, and takes some 10 KiB, and up to ``_LOOKAHEAD_BYTES`` of its request; one more is refused."""
_LOOKAHEAD_BYTES: Final = 64 << 10
_CONNECTION_CALLS: Final = 512
"""Under way on one connection, which may be a proxy's; more of them wait in the client."""
_MAX_PENDING_CALLS: Final = 65_536
"""Calls that gRPC has taken from connections and not yet handed to us. By default it cancels some above 1000, and all
above 3000 over all clients: a client that begins and resets calls rapidly would have those of others cancelled."""
_SECONDS: Final = {
    # A silent connection is pinged after so long, and closed if it has not answered after so long.
    "grpc.keepalive_time_ms": 60.0,
    "grpc.keepalive_timeout_ms": 20.0,
    # A client that pings more often while no data flows is disconnected after two strikes.
    "grpc.http2.min_ping_interval_without_data_ms": 10.0,
    "grpc.max_connection_idle_ms": 3600.0,
    # A connection is asked to leave after so long, so that clients spread over servers started later.
    "grpc.max_connection_age_ms": 86_400.0,
    "grpc.max_connection_age_grace_ms": 60.0,
}


def _options(limits: Limits, *, reuse_port: bool) -> list[tuple[str, int]]:
    """As gRPC takes them: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    seconds = {**_SECONDS, "grpc.server_handshake_timeout_ms": limits.receive_seconds}
    counts = {
        "grpc.max_receive_message_length": limits.body_bytes,
        # The server refuses a response that is too long itself, with a message that says so.
        "grpc.max_send_message_length": -1,
        # Of a call that is not read from. Probes would have fast clients raise it.
        "grpc.http2.lookahead_bytes": _LOOKAHEAD_BYTES,
        "grpc.http2.bdp_probe": 0,
        "grpc.max_allowed_incoming_connections": limits.connections,
        "grpc.max_metadata_size": limits.header_bytes,
        "grpc.absolute_max_metadata_size": limits.header_bytes,
        "grpc.max_concurrent_streams": _CONNECTION_CALLS,
        "grpc.server.max_pending_requests": _MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": _MAX_PENDING_CALLS,
        "grpc.http2.max_ping_strikes": 2,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.so_reuseport": int(reuse_port),
    }
    return [*counts.items(), *((name, max(1, round(value * 1e3))) for name, value in seconds.items())]


class GrpcServer:
    """Serves an engine until it is stopped; once. ValueError: a token that cannot be used."""

    def __init__(
        self,
        engine: Repository,
        limits: Limits | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reuse_port: bool = False,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._service = InferenceService(engine, self._limits, token)
        self._address = address(host, port)
        self._reuse_port = reuse_port
        self._credentials = None if tls is None else tls.credentials()
        self._server: Any = None

    async def start(self) -> int:
        """Listen; returns the port. OSError if the address cannot be listened on."""
        server = grpc.aio.server(
            options=_options(self._limits, reuse_port=self._reuse_port),
            maximum_concurrent_rpcs=self._limits.calls + _OTHER_CALLS,
        )
        server.add_generic_rpc_handlers(self._service.handlers())
        try:
            if self._credentials:
                port = server.add_secure_port(self._address, self._credentials)
            else:
                port = server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {self._address}: {error}") from None
        await server.start()
        self._server = server
        return int(port)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more calls, give those in flight so long to end, then cancel them. May be called again."""
        if self._server is not None:
            await self._server.stop(grace_seconds)
