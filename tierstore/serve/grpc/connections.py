"""The TCP connections of this process, which gRPC does not show."""

import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

__all__ = ["disconnect"]

_Address = tuple[IPv4Address | IPv6Address, int]


def _address(host: str, port: int) -> _Address:
    """With the IPv4 address of a client that came over IPv4 to a socket of IPv6."""
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _parse(peer: str) -> _Address:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _address(host.strip("[]"), int(port))


def _socket(descriptor: int) -> socket.socket | None:
    """A socket for a copy of a descriptor, or None if that is not one's."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def disconnect(peer: str) -> bool:
    """Shut down the connections of a client, both ways; the thread that serves them notices.

    Args:
        peer: as ``grpc.ServicerContext.peer`` says it: "ipv4:127.0.0.1:34173" or "ipv6:%5B::1%5D:34173".

    Returns:
        Whether there was one.
    """
    wanted = _parse(peer)
    found = False
    for name in os.listdir("/dev/fd"):
        candidate = _socket(int(name))
        if candidate is None:
            continue
        with candidate:
            try:
                if (
                    candidate.family in (socket.AF_INET, socket.AF_INET6)
                    and _address(*candidate.getpeername()[:2]) == wanted
                ):
                    candidate.shutdown(socket.SHUT_RDWR)
                    found = True
            except OSError:
                continue  # it listens, or is over
    return found
