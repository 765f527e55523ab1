"""How many system calls a response takes."""

import asyncio
from typing import Any

from tests.serve.fakes import FakeEngine
from tierstore.serve.rest import HttpServer, RestApp


class _Recorder(asyncio.Transport):
    """Keeps what each system call would send."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.sent.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _sent(request: bytes) -> list[bytes]:
    transport = _Recorder()
    connection = HttpServer(RestApp(FakeEngine()))._protocol()
    connection.connection_made(transport)
    connection.data_received(request)
    for _ in range(20):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return transport.sent


def test_a_responses_head_and_body_are_one_write() -> None:
    for first, close in ((b"GET /v2", b""), (b"GET /v2", b"connection: close\r\n"), (b"HEAD /v2", b"")):
        request = first + b" HTTP/1.1\r\nhost: a\r\n" + close + b"\r\n"
        (whole,) = asyncio.run(_sent(request))
        head, _, body = whole.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert bool(body) is first.startswith(b"GET")
    both = asyncio.run(_sent(2 * b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n"))
    assert len(both) == 2
    assert both[0] == both[1]


def test_a_client_that_waits_for_leave_to_send_gets_it_at_once() -> None:
    headers = b"host: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    leave, *_ = asyncio.run(_sent(b"POST /v2/models/double/infer HTTP/1.1\r\n" + headers))
    assert leave == b"HTTP/1.1 100 Continue\r\n\r\n"
