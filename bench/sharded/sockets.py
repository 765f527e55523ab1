"""Bytes on the wire: what the kernel says that this process's TCP connections carried, headers of gloo included."""

import inspect
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Sent", "count_sent"]

_SENT: Final = struct.Struct("200xQQ")
"""``tcpi_bytes_sent``, and ``tcpi_bytes_retrans`` among them, of Linux's ``struct tcp_info``, <linux/tcp.h>."""
_SETTLE_SECONDS: Final = 0.05


class Sent(NamedTuple):
    """Bytes that a rank sent to others.

    Attributes:
        total: on its connections.
        ids: of them, integers given to ``all_to_all_single``: ids, lengths, counts.
    """

    total: int
    ids: int


def _sent_bytes() -> int:
    total = 0
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        except OSError:
            continue  # the one that lists the folder
        with socket.socket(fileno=os.dup(number)) as each:
            if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6):
                sent, again = _SENT.unpack(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size))
                total += sent - again
    return total


def _settled_bytes() -> int:
    """What was sent once nothing more is."""
    known = -1
    while known != (found := _sent_bytes()):
        known = found
        time.sleep(_SETTLE_SECONDS)
    return known


def count_sent(action: Callable[[], object]) -> Sent:
    """What this rank sends during an action of all ranks. Collective."""
    dist.barrier()
    before, ids = _settled_bytes(), 0
    dist.barrier()  # whose bytes are counted: no rank begins before all know what was sent
    own = dist.all_to_all_single
    signature = inspect.signature(own)

    def counting(*arguments: Any, **named: Any) -> Any:
        nonlocal ids
        bound = signature.bind(*arguments, **named).arguments
        given, sizes = bound["input"], bound.get("input_split_sizes")
        if given.dtype in (torch.int32, torch.int64):
            kept = sizes[dist.get_rank()] if sizes else len(given) // dist.get_world_size()
            ids += (len(given) - kept) * given.itemsize
        return own(*arguments, **named)

    dist.all_to_all_single = counting
    try:
        action()
    finally:
        dist.all_to_all_single = own
    return Sent(_settled_bytes() - before, ids)
