"""The Open Inference Protocol over REST: an ASGI application over an engine.

Plain ASGI: paths are few, and what a framework does around each request costs as much as a small one itself.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...system.excerpt import excerpt
from ...system.release import __version__
from ..base import Engine
from ..front import Front
from ..limits import Limits
from ..messages import EXTENSIONS, ModelMetadata, ServeError, Status
from ..tensors import JSON_LENGTH_HEADER
from .body import read_body
from .infer_body import MAX_ID_CHARACTERS, InferBody, InferCall, count_slow_elements, parse_infer, write_infer
from .replies import Header, Reply, error_reply, json_reply, refusal, send_reply

__all__ = ["RestApp"]

_LOGGER: Final = logging.getLogger(__name__)
_OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
_JSON_LENGTH: Final = JSON_LENGTH_HEADER.lower().encode()


class RestApp:
    """Every path under /v2. It has no lifespan: the engine is ready or not by itself.

    Args:
        limits: what a body may take; connections are the server's to limit.
        token: that requests must show, but for those about the server's health; None for none.
    """

    def __init__(self, engine: Engine, *, limits: Limits | None = None, token: str | None = None) -> None:
        self._engine = engine
        self._limits = limits or Limits()
        self._front = Front(engine, "http", self._limits, token)

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of all requests under way."""
        return self._front.requests.held

    @property
    def unsent_bytes(self) -> int:
        """Bytes of large responses that are being written, or that clients have not accepted yet."""
        return self._front.unsent.held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is spoken here, not {scope['type']}")
        try:
            reply = await self._answer(scope, receive)
        except ClientDisconnect:
            return
        except Exception:
            _LOGGER.exception("a request failed")
            reply = error_reply(Status.INTERNAL.http, "internal error; the server's log has more")
        await self._send(send, reply)

    async def _send(self, send: Send, reply: Reply) -> None:
        try:
            with self._front.noting_refusals(), self._front.hold_unsent(len(reply.body)):
                await send_reply(send, reply)
        except ServeError as error:
            await send_reply(send, refusal(error))

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        if scope["path"] not in _OPEN_PATHS:
            shown = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                self._front.require_token(shown, "give the server's token: Authorization: Bearer TOKEN")
            except ServeError as error:
                return refusal(error, (b"www-authenticate", b"Bearer"))
        parts = _parts(scope)
        match parts:
            case ["", "v2", "models", name, "infer"]:
                return await self._infer(scope, receive, name, "")
            case ["", "v2", "models", name, "versions", version, "infer"] if version:
                return await self._infer(scope, receive, name, version)
            case ["", "v2", "repository", "index"]:
                # Of the body, which may ask for ready ones only, nothing is read.
                return json_reply(self._front.index()) if scope["method"] == "POST" else _not_allowed(scope, b"POST")
        value = self._look_up(parts)
        if value is None:
            where = excerpt(scope["path"])
            return error_reply(404, f"there is nothing at {where}; POST /v2/repository/index lists the models")
        if scope["method"] not in ("GET", "HEAD"):
            return _not_allowed(scope, b"GET, HEAD")
        return value

    def _look_up(self, parts: list[str]) -> Reply | None:
        """What a path shows; None if there is nothing."""
        match parts:
            case ["", "v2"]:
                return json_reply({"name": "tierstore", "version": __version__, "extensions": EXTENSIONS})
            case ["", "v2", "health", "live"]:
                return _ready(self._engine.is_live, "live")
            case ["", "v2", "health", "ready"]:
                return _ready(self._engine.is_ready, "ready")
            case ["", "v2", "models", name]:
                return self._model(name, "")
            case ["", "v2", "models", name, "ready"]:
                return self._model_ready(name, "")
            case ["", "v2", "models", name, "versions", version] if version:
                return self._model(name, version)
            case ["", "v2", "models", name, "versions", version, "ready"] if version:
                return self._model_ready(name, version)
        return None

    def _model(self, name: str, version: str) -> Reply:
        try:
            return json_reply(_metadata(self._engine.model(name, version)))
        except ServeError as error:
            return refusal(error)

    def _model_ready(self, name: str, version: str) -> Reply:
        try:
            self._engine.model(name, version)
        except ServeError as error:
            return refusal(error)
        return _ready(self._engine.is_ready, "ready", name=name)

    async def _infer(self, scope: Scope, receive: Receive, model: str, version: str) -> Reply:
        if scope["method"] != "POST":
            return _not_allowed(scope, b"POST")
        headers = dict(scope["headers"])
        given_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given_id
        try:
            with self._front.requests.hold() as held:
                with self._front.noting_refusals(given_id[:MAX_ID_CHARACTERS]):
                    self._engine.model(model, version)
                    body = await read_body(held, self._limits.body_bytes, headers, receive)
                    call = self._parse(body, headers, model, version, given_id)
                request_id = call.request.id
                del body
                written = await _while_connected(self._infer_and_write(call), receive)
                return _infer_reply(written, request_id)
        except ServeError as error:
            return refusal(error, *_id_header(request_id))

    async def _infer_and_write(self, call: InferCall) -> InferBody:
        response = await self._engine.infer(call.request)
        size = sum(tensor.data.nbytes for tensor in response.outputs.values())
        with self._front.noting_refusals(call.request.id):
            way_out = "ask for binary data (the parameter binary_data_output)"
            self._front.require_few(count_slow_elements(response, call.wanted), "JSON", way_out)
            with self._front.hold_unsent(size):
                return await write_infer(response, call.wanted)

    def _parse(
        self, body: bytes, headers: Mapping[bytes, bytes], model: str, version: str, default_id: str
    ) -> InferCall:
        if len(default_id) > MAX_ID_CHARACTERS:
            raise ServeError(Status.INVALID, f"X-Request-Id is longer than {MAX_ID_CHARACTERS} characters")
        length = headers.get(_JSON_LENGTH)
        # More digits than that are beyond any body.
        if length is not None and not (length.isdigit() and len(length) < 20):
            raise ServeError(
                Status.INVALID, f"{JSON_LENGTH_HEADER} {excerpt(length.decode('latin-1'))} is not a length"
            )
        return parse_infer(
            body,
            json_bytes=None if length is None else int(length),
            json_bytes_max=self._limits.json_bytes,
            model=model,
            version=version,
            default_id=default_id,
        )


def _parts(scope: Scope) -> list[str]:
    """What stands between a path's slashes, each part decoded by itself: a table's name may have slashes of its own."""
    raw: bytes | None = scope.get("raw_path")
    path: str = quote(scope["path"]) if raw is None else raw.decode("latin-1")
    return [unquote(part) for part in path.removesuffix("/").split("/")]


async def _while_connected(work: Coroutine[Any, Any, InferBody], receive: Receive) -> InferBody:
    """What the work gives; if the client disconnects first, the work is cancelled.

    Raises:
        ServeError: the work's.
        ClientDisconnect: nobody waits for an answer.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        watcher.cancel()


def _infer_reply(body: InferBody, request_id: str) -> Reply:
    if body.json_bytes is None:
        headers: tuple[Header, ...] = ((b"content-type", b"application/json"),)
    else:
        headers = ((b"content-type", b"application/octet-stream"), (_JSON_LENGTH, b"%d" % body.json_bytes))
    return Reply(200, body.data, headers + _id_header(request_id))


def _id_header(request_id: str) -> tuple[Header, ...]:
    """X-Request-Id; none where the id is empty, or holds what a header cannot."""
    if not (request_id and len(request_id) <= MAX_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()):
        return ()
    return ((b"x-request-id", request_id.encode()),)


def _not_allowed(scope: Scope, methods: bytes) -> Reply:
    message = f"{excerpt(scope['method'])} is not allowed here, but {methods.decode()}"
    return error_reply(405, message, (b"allow", methods))


def _ready(good: bool, what: str, **more: str) -> Reply:
    return json_reply({**more, what: good}, 200 if good else 503)


def _metadata(model: ModelMetadata) -> dict[str, Any]:
    return {
        "name": model.name,
        "versions": model.versions,
        "platform": model.platform,
        "inputs": [spec._asdict() for spec in model.inputs],
        "outputs": [spec._asdict() for spec in model.outputs],
        "parameters": dict(model.parameters),
    }
