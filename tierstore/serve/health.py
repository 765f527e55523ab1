"""A server's own question to itself, before it says that it is ready."""

import asyncio
import ssl

import grpc

from ..system.hosts import address
from .grpc.messages import HEALTH_SERVICE


async def ask_rest(host: str, port: int, *, is_tls: bool) -> None:
    """OSError unless there is an answer."""
    context = None
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
    finally:
        writer.close()
    if not answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")):
        raise OSError(f"REST answers {answer[:100]!r}")


async def ask_grpc(host: str, port: int) -> None:
    """grpc.RpcError unless there is an answer."""
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address(host, port), options=options) as channel:
        await channel.unary_unary(f"/{HEALTH_SERVICE}/Check")(b"")
