"""The calls of the Open Inference Protocol over gRPC, answered by an engine; and gRPC's own health check."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import grpc

from ...system.release import __version__
from ..base import Engine
from ..encoding import Encoders
from ..logs import log_refused, log_request, request_context
from ..messages import EXTENSIONS, InferRequest, InferResponse, ServeError, Status
from . import codec
from .limits import MAX_ASKING, MAX_UNREAD, GrpcLimits
from .messages import HEALTH_SERVICE, INFERENCE_SERVICE, message_class
from .waiting import Call, Waiting

__all__ = ["InferenceService"]

_log = logging.getLogger(__name__)

_MAX_DETAIL_CHARACTERS: Final = 512
"""A status message travels in metadata, which clients bound at 8 KiB, with up to 12 bytes for a character."""

_SMALL_BYTES: Final = 64 << 10
"""Responses up to this are not counted: HTTP/2 takes as much for any call."""

_SERVING, _NOT_SERVING = 1, 2

_Respond = Callable[[Any], Any]


def _details(error: ServeError) -> str:
    text = str(error)
    return text if len(text) <= _MAX_DETAIL_CHARACTERS else text[:_MAX_DETAIL_CHARACTERS] + "..."


def _data(message: Any) -> bytes | None:
    return None if message is grpc.aio.EOF else bytes(message)


def _counted(size: int) -> int:
    return size if size > _SMALL_BYTES else 0


class _GoneError(Exception):
    """The client has left amid a response."""


class _Answer(NamedTuple):
    """A response, and what it is counted as until the client has accepted it."""

    encoded: bytes
    unsent_bytes: int


class InferenceService:
    """Answers every call; what it cannot answer is a status with the error's message, and never a traceback.

    Args:
        engine: is asked for all that is not protocol.
        limits: those of sizes and numbers that are kept here.
    """

    def __init__(self, engine: Engine, limits: GrpcLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._num_running = 0
        self._num_streams = 0
        self._held_bytes = 0
        self._unsent_bytes = 0
        self._encoders = Encoders()
        self._asking = Waiting(MAX_ASKING)
        self._unread = Waiting(MAX_UNREAD)
        self._idle = Waiting(limits.max_streams)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of large responses that are being encoded, or that clients have not accepted yet."""
        return self._unsent_bytes

    def handlers(self) -> tuple[Any, ...]:
        """For ``grpc.aio.Server.add_generic_rpc_handlers``."""
        answers: dict[str, _Respond] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "RepositoryIndex": self._repository_index,
        }
        methods = {name: self._asked(f"{name}Request", answer) for name, answer in answers.items()}
        methods["ModelInfer"] = grpc.stream_unary_rpc_method_handler(self._model_infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        health = {"Check": self._asked("HealthCheckRequest", self._check)}
        return (
            grpc.method_handlers_generic_handler(INFERENCE_SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
        )

    def refuse(self, error: ServeError, *, model: str = "", request_id: str = "") -> None:
        """Count and log a request that does not reach the engine."""
        self._engine.note_refused("grpc", error)
        log_refused("grpc", error, model=model, request_id=request_id)

    # Calls are given bytes and return bytes: a malformed message then has a status of ours, and not gRPC's. Those of
    # one message are declared as of many: gRPC then leaves it to us how long to wait for it.

    def _asked(self, request_name: str, answer: _Respond) -> Any:
        async def handle(_: Any, context: Any) -> bytes:
            call = Call(context)

            async def respond() -> _Answer:
                data = await self._receive(call, context)
                return _Answer(bytes(answer(codec.parse(request_name, data)).SerializeToString()), 0)

            return await self._or_abort(respond(), call, context)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _receive(self, call: Call, context: Any) -> bytes:
        """A call's first request; ServeError if there is none."""
        data = await self._receive_any(call, context)
        if data is None:
            error = ServeError(Status.INVALID, "the call ended without a request")
            self.refuse(error)
            raise error
        return data

    async def _receive_any(self, call: Call, context: Any) -> bytes | None:
        """Likewise, or None. A call takes no place of those that are under way before its first request has come."""
        seconds = self._limits.receive_seconds
        wait = self._asking.begin(call)
        try:
            async with asyncio.timeout(seconds):
                return _data(await context.read())
        except TimeoutError:
            error = ServeError(Status.DEADLINE, f"the request did not come within {seconds:g} seconds")
        finally:
            wait.over()
        self.refuse(error)
        raise error

    async def _or_abort(self, response: Awaitable[_Answer], call: Call, context: Any) -> bytes:
        """The response, or the status of what went wrong; either is to be accepted by the client in time."""
        try:
            encoded, unsent_bytes = await response
        except ServeError as error:
            failure = error
        except _GoneError:
            raise asyncio.CancelledError from None  # as gRPC has it, if it notices first
        except asyncio.CancelledError as error:
            traceback.clear_frames(error.__traceback__)  # TaskGroup's refer to the call in a circle
            raise
        except Exception:
            failure = self._unexpected()
        else:
            self._leave_to_grpc(call, unsent_bytes)
            return encoded
        await self.abort(failure, call, context)
        raise AssertionError("a call that is aborted goes on")

    async def abort(self, error: ServeError, call: Call, context: Any) -> None:
        """Answer a call with the status of an error; raises what gRPC then wants."""
        self._leave_to_grpc(call, 0)
        await context.abort(grpc.StatusCode[error.status.grpc], _details(error))

    def _leave_to_grpc(self, call: Call, unsent_bytes: int) -> None:
        """Give the client its time to accept what this task goes on to send."""
        wait = self._unread.begin(call, size=unsent_bytes, then=lambda: self._count_unsent(-unsent_bytes))
        wait.end_after(self._limits.send_seconds)
        call.when_over(wait.over)

    def _unexpected(self) -> ServeError:
        """What the client is told of the exception being handled, which only the log shows."""
        _log.exception("a call failed in the server")
        return ServeError(Status.INTERNAL, "internal error; the server's log has the cause")

    # Health and metadata.

    def _server_live(self, message: Any) -> Any:
        del message
        return message_class("ServerLiveResponse")(live=self._engine.is_live)

    def _server_ready(self, message: Any) -> Any:
        del message
        return message_class("ServerReadyResponse")(ready=self._engine.is_ready)

    def _model_ready(self, message: Any) -> Any:
        """A model that is not there is not ready; it is no error to ask."""
        try:
            self._engine.model(message.name, message.version)
        except ServeError as error:
            if error.status not in (Status.NOT_FOUND, Status.UNAVAILABLE):
                raise
            return message_class("ModelReadyResponse")(ready=False)
        return message_class("ModelReadyResponse")(ready=self._engine.is_ready)

    def _check(self, message: Any) -> Any:
        if message.service not in ("", INFERENCE_SERVICE):
            raise ServeError(Status.NOT_FOUND, f"the services are '' and {INFERENCE_SERVICE!r}")
        is_serving = self._engine.is_live and self._engine.is_ready
        return message_class("HealthCheckResponse")(status=_SERVING if is_serving else _NOT_SERVING)

    def _server_metadata(self, message: Any) -> Any:
        del message
        return message_class("ServerMetadataResponse")(name="tierstore", version=__version__, extensions=EXTENSIONS)

    def _model_metadata(self, message: Any) -> Any:
        metadata = self._engine.model(message.name, message.version)
        tensor_class = message_class("ModelMetadataResponse.TensorMetadata")
        return message_class("ModelMetadataResponse")(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=[tensor_class(**spec._asdict()) for spec in metadata.inputs],
            outputs=[tensor_class(**spec._asdict()) for spec in metadata.outputs],
        )

    def _repository_index(self, message: Any) -> Any:
        state = "READY" if self._engine.is_ready else "UNAVAILABLE"
        response = message_class("RepositoryIndexResponse")()
        for model in self._engine.models() if self._engine.is_ready or not message.ready else ():
            for version in model.versions:
                response.models.add(name=model.name, version=version, state=state)
        return response

    # Inference.

    @contextmanager
    def _admission(self) -> Iterator[None]:
        """Counts a call while it lasts; ServeError OVERLOADED if too many do."""
        if self._num_running >= self._limits.max_concurrent_rpcs:
            error = ServeError(Status.OVERLOADED, f"{self._num_running} calls are under way; try again later")
            self.refuse(error)
            raise error
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    @contextmanager
    def _stream_admission(self, call: Call) -> Iterator[None]:
        """Likewise of streams, so that those that are held open leave room for other calls."""
        if self._num_streams >= self._limits.max_streams and not self._idle.make_room(call.peer, 1):
            error = ServeError(Status.OVERLOADED, f"{self._num_streams} streams are open; try again later")
            self.refuse(error)
            raise error
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @contextmanager
    def _holding(self, data: bytes) -> Iterator[None]:
        """Counts a request's bytes while it is answered; ServeError OVERLOADED if all together are too many."""
        limit = self._limits.max_held_bytes
        if self._held_bytes + len(data) > limit:
            error = ServeError(Status.OVERLOADED, f"the requests under way hold {limit} bytes; try again later")
            self.refuse(error)
            raise error
        self._held_bytes += len(data)
        try:
            yield
        finally:
            self._held_bytes -= len(data)

    def _count_unsent(self, size: int) -> None:
        self._unsent_bytes += size

    def _reserve_unsent(self, size: int, call: Call) -> None:
        """Count a large response; ServeError OVERLOADED if all together are too many, and no other has more of them."""
        limit = self._limits.max_unsent_bytes
        while size and self._unsent_bytes + size > limit:
            if not self._unread.make_room(call.peer, size):
                error = ServeError(Status.OVERLOADED, f"clients have yet to accept {limit} bytes; try again later")
                self._engine.note_refused("grpc", error)
                raise error
        self._count_unsent(size)

    async def _model_infer(self, _: Any, context: Any) -> bytes:
        call = Call(context)

        async def respond() -> _Answer:
            data = await self._receive(call, context)
            with self._admission(), self._holding(data):
                return await self._infer(self._read(data), context.time_remaining(), call)

        return await self._or_abort(respond(), call, context)

    def _read(self, data: bytes) -> codec.RawRequest:
        try:
            return codec.read_request(data)
        except ServeError as error:
            self.refuse(error)
            raise

    async def _infer(self, raw_request: codec.RawRequest, seconds_left: float | None, call: Call) -> _Answer:
        """The response, counted as unsent; ServeError for all that can go wrong."""
        started = time.monotonic()
        message, raws = raw_request
        with request_context(message.id):
            try:
                request = codec.decode_request(raw_request, seconds_left=seconds_left)
            except ServeError as error:
                self.refuse(error, model=message.model_name, request_id=message.id)
                raise
            try:
                response = await self._engine.infer(request)
                answer = await self._encode(response, bool(raws), call)
            except asyncio.CancelledError:
                log_request(request, grpc.StatusCode.CANCELLED.name, time.monotonic() - started)
                raise
            except Exception as error:
                raise self._failed(request, error, started) from None
            log_request(request, "OK", time.monotonic() - started, version=response.version)
        return answer

    async def _encode(self, response: InferResponse, is_raw: bool, call: Call) -> _Answer:
        num_elements = codec.count_slow_elements(response, is_raw=is_raw)
        limit = self._limits.max_response_elements
        if num_elements > limit:
            raise ServeError(
                Status.TOO_LARGE,
                f"the response has {num_elements} elements, and {limit} are sent as typed contents or BYTES; ask with "
                "raw_input_contents, and it comes raw, or ask for less at once",
            )
        size = sum(tensor.data.nbytes for tensor in response.outputs.values() if tensor.datatype != "BYTES")
        if is_raw:
            self._require_size(size)
        counted = _counted(size)
        self._reserve_unsent(counted, call)
        try:
            work = partial(codec.encode_response, response, is_raw=is_raw)
            encoded = await self._encoders.encode(lambda pause: work(pause=pause), num_elements)
            self._require_size(len(encoded))
        finally:
            self._count_unsent(-counted)
        self._reserve_unsent(_counted(len(encoded)), call)
        return _Answer(encoded, _counted(len(encoded)))

    def _require_size(self, size: int) -> None:
        limit = self._limits.max_response_bytes
        if size > limit:
            raise ServeError(Status.TOO_LARGE, f"the response has {size} bytes, over {limit}; ask for less at once")

    def _failed(self, request: InferRequest, error: Exception, started: float) -> ServeError:
        failure = error if isinstance(error, ServeError) else self._unexpected()
        log_request(request, failure.status.grpc, time.monotonic() - started, error=failure)
        return failure

    async def _model_stream_infer(self, _: Any, context: Any) -> None:
        """Answers in the order of requests, and computes some at a time; one that fails does not end the stream."""
        call = Call(context)

        async def respond() -> _Answer:
            first = [await self._receive_any(call, context)]
            with self._admission(), self._stream_admission(call):
                try:
                    await self._pump(first.pop(), call, context)
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None
            return _Answer(b"", 0)

        await self._or_abort(respond(), call, context)

    async def _pump(self, data: bytes | None, call: Call, context: Any) -> None:
        """Answer the first request, if there is one, and all that come after it."""
        slots = asyncio.Semaphore(self._limits.max_stream_requests)
        answers: asyncio.Queue[asyncio.Task[_Answer] | None] = asyncio.Queue()  # bounded by the slots
        unwritten: set[asyncio.Task[_Answer]] = set()

        async def write() -> None:
            while answer := await answers.get():
                encoded, unsent_bytes = await answer
                unwritten.remove(answer)
                await self._write(encoded, unsent_bytes, call, context)
                slots.release()

        idle: ServeError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(write())
                try:
                    while data is not None:
                        await slots.acquire()
                        answer = tasks.create_task(self._stream_answer(data, context.time_remaining(), call))
                        unwritten.add(answer)
                        answers.put_nowait(answer)
                        del data  # its bytes are counted until it is answered
                        data = await self._next(call, context)
                except ServeError as error:
                    idle = error  # once what was asked before is answered
                answers.put_nowait(None)
        finally:
            for answer in unwritten:
                if not answer.cancelled() and answer.exception() is None:
                    self._count_unsent(-answer.result().unsent_bytes)
        if idle is not None:
            raise idle

    async def _write(self, encoded: bytes, unsent_bytes: int, call: Call, context: Any) -> None:
        """Send a message of a stream; the call is ended if the client does not accept it in time."""
        wait = self._unread.begin(call, size=unsent_bytes, then=lambda: self._count_unsent(-unsent_bytes))
        wait.end_after(self._limits.max_stream_idle_seconds)
        try:
            await context.write(encoded)
        except grpc.aio.InternalError:
            raise _GoneError from None
        finally:
            wait.over()

    async def _next(self, call: Call, context: Any) -> bytes | None:
        seconds = self._limits.max_stream_idle_seconds
        wait = self._idle.begin(call, size=1)
        try:
            async with asyncio.timeout(seconds):
                return _data(await context.read())
        except TimeoutError:
            raise ServeError(Status.DEADLINE, f"nothing came on the stream for {seconds:g} seconds") from None
        finally:
            wait.over()

    async def _stream_answer(self, data: bytes, seconds_left: float | None, call: Call) -> _Answer:
        request_id = ""
        try:
            with self._holding(data):
                raw_request = self._read(data)
                request_id = raw_request.message.id
                response = await self._infer(raw_request, seconds_left, call)
                return _Answer(codec.encode_stream_response(response.encoded), response.unsent_bytes)
        except ServeError as error:
            failure = error
        except Exception:
            failure = self._unexpected()
        return _Answer(codec.encode_stream_error(_details(failure), request_id), 0)
