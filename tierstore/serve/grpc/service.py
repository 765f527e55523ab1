"""The calls of the Open Inference Protocol over gRPC, answered by an engine; and gRPC's own health check."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import grpc

from ... import __version__
from ..base import Engine
from ..encoding import Encoders
from ..logs import log_refused, log_request, request_context
from ..messages import EXTENSIONS, InferRequest, InferResponse, ServeError, Status
from . import codec
from .connections import Disconnection
from .limits import MAX_AWAITED, GrpcLimits
from .messages import HEALTH_SERVICE, INFERENCE_SERVICE, message_class

__all__ = ["InferenceService"]

_log = logging.getLogger(__name__)

_MAX_DETAIL_CHARACTERS: Final = 512
"""A status message travels in metadata, which clients bound at 8 KiB, with up to 12 bytes for a character."""

_SMALL_BYTES: Final = 64 << 10
"""Responses up to this are not counted: HTTP/2 takes as much for any call."""

_SERVING, _NOT_SERVING = 1, 2

_Answer = Callable[[Any], Any]


def _details(error: ServeError) -> str:
    text = str(error)
    return text if len(text) <= _MAX_DETAIL_CHARACTERS else text[:_MAX_DETAIL_CHARACTERS] + "..."


def _counted(size: int) -> int:
    return size if size > _SMALL_BYTES else 0


def _when_over(then: Callable[[], object]) -> None:
    """Have something done once the call is over for which this task works, which goes on to send the response."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: then())


class _GoneError(Exception):
    """The client has left amid a response."""


class _Unsent:
    """The bytes that one call's responses take of what all may."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._size = 0

    def add(self, size: int) -> None:
        """Count a large response, or less of one; ServeError OVERLOADED if all together are too many."""
        self._count(size)
        self._size += size

    def release(self) -> None:
        self.add(-self._size)


class _StreamAnswer(NamedTuple):
    """A message of a stream, and what it was counted as."""

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
        self._awaited: dict[asyncio.Timeout, None] = {}

    @property
    def unsent_bytes(self) -> int:
        """Bytes of large responses that are being encoded, or that clients have not accepted yet."""
        return self._unsent_bytes

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

    def _asked(self, request_name: str, answer: _Answer) -> Any:
        async def respond(messages: AsyncIterator[bytes]) -> bytes:
            with self._awaiting() as limit:
                data = await self._receive(messages, limit)
            return bytes(answer(codec.parse(request_name, data)).SerializeToString())

        async def handle(messages: AsyncIterator[bytes], context: Any) -> bytes:
            return await self._or_abort(respond(messages), context)

        return grpc.stream_unary_rpc_method_handler(handle)

    @contextmanager
    def _awaiting(self) -> Iterator[asyncio.Timeout]:
        """A call's time to send its request. It has less where too many take theirs: anybody may ask for health, and
        could have all of the places by asking nothing."""
        limit = asyncio.timeout(self._limits.receive_seconds)
        self._awaited[limit] = None
        try:
            yield limit
        finally:
            self._awaited.pop(limit, None)

    async def _receive(self, messages: AsyncIterator[bytes], limit: asyncio.Timeout) -> bytes:
        try:
            async with limit:
                if len(self._awaited) > MAX_AWAITED:
                    oldest = next(iter(self._awaited))
                    del self._awaited[oldest]
                    if not oldest.expired():  # else its time is up by itself just now
                        oldest.reschedule(asyncio.get_running_loop().time())
                return await anext(aiter(messages))
        except TimeoutError:
            seconds = self._limits.receive_seconds
            error = ServeError(Status.DEADLINE, f"the request did not come within {seconds:g} seconds")
        except StopAsyncIteration:
            error = ServeError(Status.INVALID, "the call ended without a request")
        self.refuse(error)
        raise error

    async def _or_abort(self, response: Awaitable[bytes], context: Any) -> bytes:
        """The response, or the status of what went wrong; either is to be accepted by the client in time."""
        failure: ServeError | None = None
        encoded = b""
        try:
            encoded = await response
        except ServeError as error:
            failure = error
        except _GoneError:
            raise asyncio.CancelledError from None  # as gRPC has it, if it notices first
        except Exception:
            failure = self._unexpected()
        disconnection = Disconnection(context.peer(), self._limits.send_seconds)
        _when_over(disconnection.cancel)
        if failure is not None:
            await context.abort(grpc.StatusCode[failure.status.grpc], _details(failure))
        return encoded

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

    def _count_unsent(self, size: int) -> None:
        limit = self._limits.max_unsent_bytes
        if size > 0 and self._unsent_bytes + size > limit:
            error = ServeError(Status.OVERLOADED, f"clients have yet to accept {limit} bytes; try again later")
            self._engine.note_refused("grpc", error)
            raise error
        self._unsent_bytes += size

    @contextmanager
    def _sending(self) -> Iterator[_Unsent]:
        """Counts a call's responses until it is over."""
        unsent = _Unsent(self._count_unsent)
        try:
            yield unsent
        finally:
            unsent.release()

    async def _model_infer(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        """A large response keeps its place of those for inference until it has left: a client may not accept it. A
        small one does not, or who asks for one after another would at times meet his own last call."""
        sending = ExitStack()
        _when_over(sending.close)

        async def respond() -> bytes:
            with ExitStack() as counted:
                counted.enter_context(self._admission())
                unsent = counted.enter_context(self._sending())
                data = await self._receive(messages, asyncio.timeout(self._limits.receive_seconds))
                with self._holding(data):
                    encoded = await self._infer(self._read(data), context.time_remaining(), unsent)
                if _counted(len(encoded)):
                    sending.push(counted.pop_all())
                return encoded

        return await self._or_abort(respond(), context)

    def _read(self, data: bytes) -> codec.RawRequest:
        try:
            return codec.read_request(data)
        except ServeError as error:
            self.refuse(error)
            raise

    async def _infer(self, raw_request: codec.RawRequest, seconds_left: float | None, unsent: _Unsent) -> bytes:
        """The bytes of the response, counted as unsent; ServeError for all that can go wrong."""
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
                encoded = await self._encode(response, bool(raws), unsent)
            except asyncio.CancelledError:
                log_request(request, grpc.StatusCode.CANCELLED.name, time.monotonic() - started)
                raise
            except Exception as error:
                raise self._failed(request, error, started) from None
            log_request(request, "OK", time.monotonic() - started, version=response.version)
        return encoded

    async def _encode(self, response: InferResponse, is_raw: bool, unsent: _Unsent) -> bytes:
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
        unsent.add(counted)
        try:
            work = partial(codec.encode_response, response, is_raw=is_raw)
            encoded = await self._encoders.encode(lambda pause: work(pause=pause), num_elements)
            self._require_size(len(encoded))
        finally:
            unsent.add(-counted)
        unsent.add(_counted(len(encoded)))
        return encoded

    def _require_size(self, size: int) -> None:
        limit = self._limits.max_response_bytes
        if size > limit:
            raise ServeError(Status.TOO_LARGE, f"the response has {size} bytes, over {limit}; ask for less at once")

    def _failed(self, request: InferRequest, error: Exception, started: float) -> ServeError:
        failure = error if isinstance(error, ServeError) else self._unexpected()
        log_request(request, failure.status.grpc, time.monotonic() - started, error=failure)
        return failure

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answers in the order of requests, and computes some at a time; one that fails does not end the stream."""

        async def respond() -> bytes:
            with self._admission(), self._stream_admission(), self._sending() as unsent:
                try:
                    await self._pump(requests, context, unsent)
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None
            return b""

        await self._or_abort(respond(), context)

    async def _pump(self, requests: AsyncIterator[bytes], context: Any, unsent: _Unsent) -> None:
        arriving = aiter(requests)
        slots = asyncio.Semaphore(self._limits.max_stream_requests)
        answers: asyncio.Queue[asyncio.Task[_StreamAnswer] | None] = asyncio.Queue()  # bounded by the slots

        async def write() -> None:
            while answer := await answers.get():
                encoded, unsent_bytes = await answer
                disconnection = Disconnection(context.peer(), self._limits.max_stream_idle_seconds)
                try:
                    await context.write(encoded)
                except grpc.aio.InternalError:
                    raise _GoneError from None
                finally:
                    disconnection.cancel()
                unsent.add(-unsent_bytes)
                slots.release()

        idle: ServeError | None = None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            try:
                while (data := await self._next(arriving)) is not None:
                    await slots.acquire()
                    answer = self._stream_answer(data, context.time_remaining(), unsent)
                    answers.put_nowait(tasks.create_task(answer))
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

    async def _stream_answer(self, data: bytes, seconds_left: float | None, unsent: _Unsent) -> _StreamAnswer:
        request_id = ""
        try:
            with self._holding(data):
                raw_request = self._read(data)
                request_id = raw_request.message.id
                response = await self._infer(raw_request, seconds_left, unsent)
                return _StreamAnswer(codec.encode_stream_response(response), _counted(len(response)))
        except ServeError as error:
            failure = error
        except Exception:
            failure = self._unexpected()
        return _StreamAnswer(codec.encode_stream_error(_details(failure), request_id), 0)
