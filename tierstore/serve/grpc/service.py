"""The calls of the Open Inference Protocol over gRPC, answered by an engine; and gRPC's own health check."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from ... import __version__
from ..base import Engine
from ..logs import log_refused, log_request, request_context
from ..messages import EXTENSIONS, InferRequest, InferResponse, ServeError, Status
from . import codec
from .connections import disconnect
from .limits import GrpcLimits
from .messages import HEALTH_SERVICE, INFERENCE_SERVICE, message_class

__all__ = ["InferenceService"]

_log = logging.getLogger(__name__)

_MAX_DETAIL_CHARACTERS: Final = 512
"""A status message travels in metadata, which clients bound at 8 KiB, with up to 12 bytes for a character."""

_SERVING, _NOT_SERVING = 1, 2

_Answer = Callable[[Any], Any]


def _details(error: ServeError) -> str:
    text = str(error)
    return text if len(text) <= _MAX_DETAIL_CHARACTERS else text[:_MAX_DETAIL_CHARACTERS] + "..."


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

    def handlers(self) -> tuple[Any, ...]:
        """For ``grpc.aio.Server.add_generic_rpc_handlers``."""
        answers: dict[str, _Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "RepositoryIndex": self._repository_index,
        }
        methods = {name: self._asked(f"{name}Request", answer) for name, answer in answers.items()}
        methods["ModelInfer"] = self._unary(self._model_infer)
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

    # Calls are given bytes and return bytes: a malformed message then has a status of ours, and not gRPC's.

    def _asked(self, request_name: str, answer: _Answer) -> Any:
        async def respond(data: bytes, context: Any) -> bytes:
            del context
            return bytes(answer(codec.parse(request_name, data)).SerializeToString())

        return self._unary(respond)

    def _unary(self, respond: Callable[[bytes, Any], Awaitable[bytes]]) -> Any:
        """A handler of calls of one message, declared as of many: gRPC then leaves it to us how long to wait for it."""

        async def answer(messages: AsyncIterator[bytes], context: Any) -> bytes:
            return await respond(await self._receive(messages), context)

        async def handle(messages: AsyncIterator[bytes], context: Any) -> bytes:
            return await self._or_abort(answer(messages, context), context)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _receive(self, messages: AsyncIterator[bytes]) -> bytes:
        seconds = self._limits.receive_seconds
        try:
            async with asyncio.timeout(seconds):
                return await anext(aiter(messages))
        except TimeoutError:
            error = ServeError(Status.DEADLINE, f"the request did not come within {seconds:g} seconds")
        except StopAsyncIteration:
            error = ServeError(Status.INVALID, "the call ended without a request")
        self.refuse(error)
        raise error

    async def _or_abort(self, response: Awaitable[bytes], context: Any) -> bytes:
        """The response, or the status of what went wrong; either is to be accepted by the client in time."""
        try:
            encoded = await response
        except ServeError as error:
            failure = error
        except Exception:
            failure = self._unexpected()
        else:
            task = asyncio.current_task()  # which goes on to send
            assert task is not None
            timer = self._disconnect_after(self._limits.send_seconds, context)
            task.add_done_callback(lambda _: timer.cancel())
            return encoded
        await context.abort(grpc.StatusCode[failure.status.grpc], _details(failure))
        raise AssertionError("abort raises")

    def _disconnect_after(self, seconds: float, context: Any) -> asyncio.TimerHandle:
        """Closes a client's connection unless cancelled: for a client that does not accept what it is sent.

        It would hold its call, and so a part of all calls that there may be, without end, and gRPC has no milder way:
        a status waits behind the data, and the task that sends, when cancelled, leaves the call as it is.
        """

        def disconnect_now() -> None:
            _log.warning("%s accepted no answer for %g seconds: its connection is closed", context.peer(), seconds)
            disconnect(context.peer())

        return asyncio.get_running_loop().call_later(seconds, disconnect_now)

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
    def _stream_admission(self) -> Iterator[None]:
        """Likewise of streams, so that those that are held open leave room for other calls."""
        if self._num_streams >= self._limits.max_streams:
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

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        with self._admission(), self._holding(data):
            return await self._infer(self._read(data), context.time_remaining())

    def _read(self, data: bytes) -> codec.RawRequest:
        try:
            return codec.read_request(data)
        except ServeError as error:
            self.refuse(error)
            raise

    async def _infer(self, raw_request: codec.RawRequest, seconds_left: float | None) -> bytes:
        """The bytes of the response; ServeError for all that can go wrong."""
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
                encoded = self._encode(response, is_raw=bool(raws))
            except asyncio.CancelledError:
                log_request(request, grpc.StatusCode.CANCELLED.name, time.monotonic() - started)
                raise
            except Exception as error:
                raise self._failed(request, error, started) from None
            log_request(request, "OK", time.monotonic() - started, version=response.version)
        return encoded

    def _encode(self, response: InferResponse, *, is_raw: bool) -> bytes:
        encoded = codec.encode_response(response, is_raw=is_raw)
        limit = self._limits.max_response_bytes
        if len(encoded) > limit:
            raise ServeError(
                Status.TOO_LARGE, f"the response has {len(encoded)} bytes, over {limit}; ask for less at once"
            )
        return encoded

    def _failed(self, request: InferRequest, error: Exception, started: float) -> ServeError:
        failure = error if isinstance(error, ServeError) else self._unexpected()
        log_request(request, failure.status.grpc, time.monotonic() - started, error=failure)
        return failure

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answers in the order of requests, and computes some at a time; one that fails does not end the stream."""

        async def respond() -> bytes:
            with self._admission(), self._stream_admission():
                try:
                    await self._pump(requests, context)
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None
            return b""

        await self._or_abort(respond(), context)

    async def _pump(self, requests: AsyncIterator[bytes], context: Any) -> None:
        arriving = aiter(requests)
        slots = asyncio.Semaphore(self._limits.max_stream_requests)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()  # bounded by the slots

        async def write() -> None:
            while answer := await answers.get():
                encoded = await answer
                timer = self._disconnect_after(self._limits.max_stream_idle_seconds, context)
                try:
                    await context.write(encoded)
                finally:
                    timer.cancel()
                slots.release()

        idle: ServeError | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            try:
                while (data := await self._next(arriving)) is not None:
                    await slots.acquire()
                    answers.put_nowait(tasks.create_task(self._stream_answer(data, context.time_remaining())))
            except ServeError as error:
                idle = error  # once what was asked before is answered
            answers.put_nowait(None)
        if idle is not None:
            raise idle

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        seconds = self._limits.max_stream_idle_seconds
        try:
            async with asyncio.timeout(seconds):
                return await anext(messages, None)
        except TimeoutError:
            raise ServeError(Status.DEADLINE, f"nothing came on the stream for {seconds:g} seconds") from None

    async def _stream_answer(self, data: bytes, seconds_left: float | None) -> bytes:
        request_id = ""
        try:
            with self._holding(data):
                raw_request = self._read(data)
                request_id = raw_request.message.id
                return codec.encode_stream_response(await self._infer(raw_request, seconds_left))
        except ServeError as error:
            failure = error
        except Exception:
            failure = self._unexpected()
        return codec.encode_stream_error(_details(failure), request_id)
