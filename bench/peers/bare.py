"""The limit of a protocol: the library that the server speaks it with, and nothing done with what is asked."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import grpc
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tierstore.serve.grpc.messages import INFERENCE_SERVICE

from .process import HOST, PeerServer

__all__ = ["BareServer"]

_ANSWER: Final = bytes(64)


async def _application(_: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    headers = [(b"content-length", b"%d" % len(_ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _ANSWER})


async def _serve_rest() -> None:
    config = Config(
        _application, lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False,
        proxy_headers=False, ws="none",
    )  # fmt: skip
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpToolsProtocol(config, state, {}, loop), HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _serve_grpc() -> None:
    async def answer(_request: bytes, _context: Any) -> bytes:
        return _ANSWER

    server = grpc.aio.server()
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))
    print(server.add_insecure_port(f"{HOST}:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


_SERVE: Final = {"rest": _serve_rest, "grpc": _serve_grpc}


class BareServer(PeerServer):
    """A process that gives every request the same small answer: uvicorn's connections for "rest", grpc.aio for "grpc",
    in the event loop that the server has."""

    def __init__(self, protocol: str) -> None:
        command = [sys.executable, "-m", "bench.peers.bare", protocol]
        super().__init__(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]))
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())


if __name__ == "__main__":
    import uvloop

    uvloop.run(_SERVE[sys.argv[1]]())
