"""Whole HTTP answers, errors among them in the Open Inference Protocol's form: a JSON object with ``error``."""

from http import HTTPStatus
from typing import Any, Final, NamedTuple

import orjson
from starlette.types import Send

from ..limits import LARGE_RESPONSE_BYTES
from ..messages import ServeError, Status

Header = tuple[bytes, bytes]
_JSON: Final[Header] = (b"content-type", b"application/json")


class Reply(NamedTuple):
    """``headers`` are all but content-length."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = (_JSON,)


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def error_reply(status: int, message: str, *headers: Header) -> Reply:
    return Reply(status, _error_body(message), (_JSON, *headers))


def refusal(error: ServeError, *headers: Header) -> Reply:
    if error.status is Status.UNAUTHENTICATED:
        headers += ((b"www-authenticate", b"Bearer"),)
    return error_reply(error.status.http, str(error), *headers)


def _error_body(message: str) -> bytes:
    return orjson.dumps({"error": message.encode(errors="replace").decode()})


async def send_reply(send: Send, reply: Reply) -> None:
    """As ASGI messages. Returns once a large reply has been accepted by the client, all but what sockets hold."""
    length = (b"content-length", b"%d" % len(reply.body))
    is_large = len(reply.body) > LARGE_RESPONSE_BYTES
    await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, length]})
    await send({"type": "http.response.body", "body": reply.body, "more_body": is_large})
    if is_large:  # a second message waits until the first has left
        await send({"type": "http.response.body", "body": b""})


def raw_error(error: ServeError) -> bytes:
    status, body = error.status.http, _error_body(str(error))
    return b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
        status,
        HTTPStatus(status).phrase.encode(),
        len(body),
        body,
    )
