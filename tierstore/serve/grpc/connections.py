"""The TCP connections of this process, which gRPC does not show."""

import asyncio
import errno
import logging
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote

__all__ = ["Disconnection", "disconnect"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0

_Address = tuple[IPv4Address | IPv6Address, int]


def _address(host: str, port: int) -> _Address:
    """With the IPv4 address of a client that came over IPv4 to a socket of IPv6."""
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, port


def _parse(peer: str) -> _Address:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _address(host.strip("[]"), int(port))


def _socket(descriptor: int) -> socket.socket | None:
    """A socket for a copy of a descriptor, or None if that is not one's; OSError if there is no room for a copy."""
    try:
        copy = os.dup(descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:  # closed meanwhile
            return None
        raise
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

    Raises:
        OSError: this process has no descriptor left to look with.
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


class Disconnection:
    """Closes a client's connection after a time, unless cancelled: for a client that does not accept what it is sent.

    It would hold its call, and so a part of all calls that there may be, without end, and gRPC has no milder way: a
    status waits behind the data, and the task that sends, when cancelled, leaves the call as it is.
    """

    def __init__(self, peer: str, seconds: float) -> None:
        self._peer = peer
        self._seconds = seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._disconnect)

    def _disconnect(self) -> None:
        _log.warning("%s accepted no answer for %g seconds: its connection is closed", self._peer, self._seconds)
        self._try()

    def _try(self) -> None:
        # Again, until it is cancelled: the first time this process may have had no descriptor left.
        self._timer = asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._try)
        try:
            disconnect(self._peer)
        except OSError as error:
            _log.warning("%s could not be disconnected yet: %s", self._peer, error)

    def cancel(self) -> None:
        self._timer.cancel()
