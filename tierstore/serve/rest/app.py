"""The Open Inference Protocol over REST: an ASGI application over an engine.

Plain ASGI: paths are few, and what a framework does around each request costs as much as a small one itself.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...system.checks import excerpt
from ..limits import LARGE_RESPONSE_BYTES, Hold, Limits
from ..messages import JSON_LENGTH_HEADER, MAX_ID_CHARACTERS, ServeError, Status
from ..repository import SERVER, Front, Repository
from .infer_body import JSON, Header, InferCall, Reply, parse_infer, write_infer
from .server import UNDER_WAY, error_body

_LOGGER: Final = logging.getLogger(__name__)
_OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready"})
_JSON_LENGTH: Final = JSON_LENGTH_HEADER.lower().encode()


LONG_BYTES: Final = 1 << 20
"""Longer bodies would hold up the event loop: to copy 64 MiB into memory that is new takes some 0.1 s."""
_STEP_BYTES: Final = 256 << 10
_PAUSE_SECONDS: Final = 0.001
"""Once 256 KiB of a long body have come, and once more for each 8 MiB that have come before: 8 MiB take 32 ms, 64 MiB
1.2 s. All long bodies share these pauses, and most of the loop's time is left to others."""


class RestApp:
    """Every path under /v2. It has no lifespan: the engine is ready or not by itself."""

    def __init__(self, engine: Repository, *, limits: Limits | None = None, token: str | None = None) -> None:
        self._engine = engine
        self.front = Front(engine, "http", limits or Limits(), token)
        self._is_parsing = asyncio.Lock()
        self._long_bodies = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is spoken here, not {scope['type']}")
        try:
            reply = await self._answer(scope, receive)
        except ClientDisconnect:
            return
        except ServeError as error:
            reply = refusal(error)
        except Exception:
            _LOGGER.exception("a request failed")
            reply = refusal(ServeError(Status.INTERNAL, "internal error; the server's log has more"))
        try:
            with self.front.noting_refusals(), self.front.hold_unsent(len(reply.body)):
                await send_reply(send, reply)
        except ServeError as error:
            await send_reply(send, refusal(error))

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        # Each part is decoded by itself: a table's name may have slashes of its own.
        parts = [unquote(part) for part in scope["raw_path"].decode("latin-1").removesuffix("/").split("/")]
        if self.front.wants_token and scope["path"] not in _OPEN_PATHS:
            shown = [value for name, value in scope["headers"] if name == b"authorization"]
            self.front.require_token(shown, "give the server's token: Authorization: Bearer TOKEN")
        version = ""
        if len(parts) > 5 and parts[2] == "models" and parts[4] == "versions" and parts[5]:
            version = parts[5]
            del parts[4:6]
        match parts:
            case ["", "v2", "models", name, "infer"]:
                return await self._infer(scope, receive, name, version)
            case ["", "v2", "repository", "index"]:
                # Of the body, which may ask for ready ones only, nothing is read.
                return json_reply(self._engine.index()) if scope["method"] == "POST" else _not_allowed(scope, b"POST")
        value = self._look_up(parts, version)
        if value is None:
            where = excerpt(scope["path"])
            way_out = "POST /v2/repository/index lists the models"
            raise ServeError(Status.NOT_FOUND, f"there is nothing at {where}; {way_out}")
        if scope["method"] not in ("GET", "HEAD"):
            return _not_allowed(scope, b"GET, HEAD")
        return value

    def _look_up(self, parts: list[str], version: str) -> Reply | None:
        """What a path shows; None if there is nothing."""
        match parts:
            case ["", "v2"]:
                return json_reply(SERVER)
            case ["", "v2", "health", "live"]:
                return _ready(self._engine.is_live, "live")
            case ["", "v2", "health", "ready"]:
                return _ready(self._engine.is_ready, "ready")
            case ["", "v2", "models", name, "config"]:
                return json_reply(self.front.config(name, version))
            case ["", "v2", "models", name]:
                return json_reply(self._engine.model(name, version))
            case ["", "v2", "models", name, "ready"]:
                return _ready(self._engine.is_model_ready(name, version), "ready", name=name)
        return None

    async def _infer(self, scope: Scope, receive: Receive, model: str, version: str) -> Reply:
        if scope["method"] != "POST":
            return _not_allowed(scope, b"POST")
        headers, limits = dict(scope["headers"]), self.front.limits
        request_id = given_id = headers.get(b"x-request-id", b"").decode("latin-1")
        noting = self.front.noting_refusals(given_id[:MAX_ID_CHARACTERS])
        try:
            with noting:
                held = self.front.hold_request(model)
            with held:
                with noting:
                    body = await read_body(held, limits.body_bytes, headers, receive, self._long_bodies)
                    parse = partial(
                        parse_infer, body, json_bytes=_json_length(headers), json_bytes_max=limits.json_bytes,
                        model=model, version=version, default_id=given_id, client=f"{scope.get('client')}",
                    )  # fmt: skip
                with _while_connected(scope):
                    with noting:
                        if len(body) <= LONG_BYTES:
                            call = parse()
                        else:  # one at a time, as JSON is there twice meanwhile and ``bodies_bytes`` counts it once
                            async with self._is_parsing:
                                call = await asyncio.to_thread(parse)
                    request_id = call.request.id
                    del body, parse
                    reply = await self._infer_and_write(call)
                return reply._replace(headers=reply.headers + _id_header(request_id))
        except ServeError as error:
            return refusal(error, *_id_header(request_id))

    async def _infer_and_write(self, call: InferCall) -> Reply:
        response = await self._engine.infer(call.request)
        tensors = response.outputs.items()
        with self.front.noting_refusals(call.request.id):
            slow = sum(tensor.data.size for name, tensor in tensors if not call.is_binary(name))
            self.front.require_few(slow, "JSON", "ask for binary data (the parameter binary_data_output)")
            with self.front.hold_unsent(sum(tensor.data.nbytes for _, tensor in tensors)):
                return await write_infer(response, call)


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def error_reply(status: int, message: str, *headers: Header) -> Reply:
    return Reply(status, error_body(message), (JSON, *headers))


def refusal(error: ServeError, *headers: Header) -> Reply:
    if error.status is Status.UNAUTHENTICATED:
        headers += ((b"www-authenticate", b"Bearer"),)
    return error_reply(error.status.http, str(error), *headers)


async def send_reply(send: Send, reply: Reply) -> None:
    """As ASGI messages. Returns once a large reply has been accepted by the client, all but what sockets hold."""
    length = (b"content-length", b"%d" % len(reply.body))
    is_large = len(reply.body) > LARGE_RESPONSE_BYTES
    await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, length]})
    await send({"type": "http.response.body", "body": reply.body, "more_body": is_large})
    if is_large:  # a second message waits until the first has left
        await send({"type": "http.response.body", "body": b""})


def _json_length(headers: Mapping[bytes, bytes]) -> int | None:
    length = headers.get(_JSON_LENGTH)
    # More digits than that are beyond any body.
    if length is not None and not (length.isdigit() and len(length) < 20):
        raise ServeError(Status.INVALID, f"{JSON_LENGTH_HEADER} {excerpt(length.decode('latin-1'))} is not a length")
    return None if length is None else int(length)


@contextmanager
def _while_connected(scope: Scope) -> Iterator[None]:
    """ClientDisconnect if the protocol cancels what is done, as nobody waits for it any more."""
    task = asyncio.current_task()
    assert task is not None
    under_way: set[asyncio.Task[Any]] = scope["state"][UNDER_WAY]
    under_way.add(task)
    try:
        yield
    except asyncio.CancelledError:
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        under_way.discard(task)


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


async def read_body(
    held: Hold, max_bytes: int, headers: Mapping[bytes, bytes], receive: Receive, turn: asyncio.Lock
) -> bytearray:
    """The body; it grows in place, and ``held`` with it. Long ones take the turn. ServeError TOO_LARGE, OVERLOADED or
    INVALID; ClientDisconnect."""

    def require_length(size: int) -> None:
        if size > max_bytes:
            raise ServeError(Status.TOO_LARGE, f"the body is longer than {max_bytes} bytes")

    length = headers.get(b"content-length", b"0")
    if length.isdigit():
        require_length(int(length[:20]))
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
    if encoding != "identity":
        raise ServeError(Status.INVALID, f"content-encoding {excerpt(encoding)} is not taken; send the body as it is")
    body, unpaused_bytes, more = bytearray(), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        require_length(len(body) + len(part))
        held.grow(len(part))
        body += part
        unpaused_bytes += len(part)
        if len(body) > LONG_BYTES and unpaused_bytes >= _STEP_BYTES:
            unpaused_bytes = 0
            async with turn:
                await asyncio.sleep(_PAUSE_SECONDS * (1 + (len(body) >> 23)))
    return body
