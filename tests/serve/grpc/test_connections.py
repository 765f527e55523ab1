"""A client's connection is closed by its address, and no other."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tierstore.serve.grpc.connections import disconnect

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(resources: ExitStack, host: str) -> socket.socket:
    try:
        if host == "::":
            made = socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            made = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip("no IPv6 here")
    return resources.enter_context(made)


def connect(resources: ExitStack, listening: socket.socket, host: str) -> Pair:
    """A client's end and the server's."""
    client = resources.enter_context(socket.create_connection((host, listening.getsockname()[1])))
    accepted, _ = listening.accept()
    client.settimeout(5)
    return client, resources.enter_context(accepted)


@pytest.mark.parametrize(
    ("listening_on", "client_host", "peer"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        ("::1", "::1", "ipv6:%5B::1%5D:{}"),
        ("::1", "::1", "ipv6:[::1]:{}"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
    ],
)
def test_only_that_client_is_disconnected(resources: ExitStack, listening_on: str, client_host: str, peer: str) -> None:
    listening = listener(resources, listening_on)
    (closed, _), (other, other_accepted) = (connect(resources, listening, client_host) for _ in range(2))
    assert disconnect(peer.format(closed.getsockname()[1]))
    assert closed.recv(1) == b""
    other_accepted.sendall(b"x")
    assert other.recv(1) == b"x"
    assert connect(resources, listening, client_host), "the server listens on"


def test_client_that_is_not_there(resources: ExitStack) -> None:
    listening = listener(resources, "127.0.0.1")
    client, accepted = connect(resources, listening, "127.0.0.1")
    port = client.getsockname()[1]
    assert not disconnect(f"ipv4:127.0.0.2:{port}")
    accepted.sendall(b"x")
    assert client.recv(1) == b"x"
    accepted.close()
    client.close()
    assert not disconnect(f"ipv4:127.0.0.1:{port}")
