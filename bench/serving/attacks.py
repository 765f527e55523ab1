"""One client that takes of a server what it can, until its standard input ends; a process of its own.

It comes last on the machine's cores: on its own machine it would take none of the server's.
"""

import itertools
import json
import os
import select
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from h2.events import ConnectionTerminated, StreamEnded, StreamReset

from tierstore.serve.grpc.messages import HEALTH_SERVICE, INFERENCE_SERVICE

from ..child import HOST
from .clients import BlockingRest
from .http2 import begun, headers_of, send_part
from .queries import Query, encoded_rest

__all__ = ["KINDS", "READY"]

READY: Final = "ready"
_BODY, _HALF = 64 << 20, 4 << 20
_CALLS: Final = 32
"""Under way on a connection."""


class _Target(NamedTuple):
    rest_port: int
    grpc_port: int
    token: str
    rows: int
    stop: threading.Event


class _Bodies:
    """A connection whose calls each send a message, or all of it but the last byte; once one has ended, another."""

    def __init__(self, port: int, method: str, size: int, *, token: str = "", is_whole: bool) -> None:
        self._headers, self._is_whole = headers_of(method, token), is_whole
        message = struct.pack(">BI", 0, size - 5) + bytes(size - 5)
        self._message = memoryview(message)[: None if is_whole else -1]
        self._socket = socket.create_connection((HOST, port), 20)
        self._http2, self._unsent = begun(), dict[int, memoryview]()
        self._socket.sendall(self._http2.data_to_send())
        self._socket.setblocking(False)
        self._out = b""

    def turn(self, counts: Counter[str]) -> None:
        """Send and take what there is; OSError if the server has closed the connection."""
        while len(self._unsent) < min(_CALLS, self._http2.remote_settings.max_concurrent_streams):
            stream = self._http2.get_next_available_stream_id()
            self._http2.send_headers(stream, self._headers)
            self._unsent[stream] = self._message
        if len(self._out) < 1 << 20:
            for stream, unsent in self._unsent.items():
                self._unsent[stream] = send_part(self._http2, stream, unsent, is_last=self._is_whole)
                counts["bytes"] += len(unsent) - len(self._unsent[stream])
        self._out += self._http2.data_to_send()
        readable, writable, _ = select.select([self._socket], [self._socket] if self._out else [], [], 0.01)
        if writable:
            self._out = self._out[self._socket.send(self._out) :]
        if readable:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            for event in self._http2.receive_data(data):
                if isinstance(event, StreamEnded | StreamReset):
                    counts["ended"] += self._unsent.pop(event.stream_id, None) is not None
                elif isinstance(event, ConnectionTerminated):
                    raise ConnectionResetError

    def close(self) -> None:
        self._socket.close()


def _send_bodies(make: Sequence[Callable[[], _Bodies]], stop: threading.Event) -> Counter[str]:
    """Over one connection of each, made again when it is lost."""
    counts: Counter[str] = Counter()
    connections = [each() for each in make]
    while not stop.is_set():
        for index, each in enumerate(connections):
            try:
                each.turn(counts)
            except OSError:
                counts["lost"] += 1
                each.close()
                connections[index] = make[index]()
    for each in connections:
        each.close()
    return counts


def _whole(target: _Target) -> Counter[str]:
    methods = (f"/{INFERENCE_SERVICE}/ServerLive", f"/{HEALTH_SERVICE}/Check")
    make = [partial(_Bodies, target.grpc_port, method, _BODY, is_whole=True) for method in methods]
    return _send_bodies(make, target.stop)


def _half(target: _Target) -> Counter[str]:
    method = f"/{INFERENCE_SERVICE}/ModelInfer"
    make = partial(_Bodies, target.grpc_port, method, _HALF, token=target.token, is_whole=False)
    return _send_bodies([make] * 8, target.stop)


def _ask(target: _Target, inputs: Sequence[tuple[str, dict[str, Any]]], at_once: int) -> Counter[str]:
    """The requests by turns, over some connections at a time."""
    requests = [encoded_rest(Query(*each), target.token) for each in inputs]
    counts: Counter[str] = Counter()

    def ask() -> None:
        client = BlockingRest(HOST, target.rest_port)
        for request in itertools.cycle(requests):
            if target.stop.is_set():
                break
            try:
                counts[client.ask(request).error[:3] or "200"] += 1
            except OSError:
                counts["lost"] += 1
                client.close()
                client = BlockingRest(HOST, target.rest_port)
        client.close()

    threads = [threading.Thread(target=ask) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _bags(target: _Target, bags: int, size: int) -> Counter[str]:
    ids = np.random.default_rng(0).integers(0, target.rows, bags * size, np.int32)
    return _ask(target, [("pooled.item", {"ids": ids, "lengths": np.full(bags, size, np.int32)})], 1)


def _poison(target: _Target) -> Counter[str]:
    """Of two queries one has an hour that the model does not know."""
    ids = {"values": np.arange(10), "lengths": np.ones((1, 10), np.int32)}
    return _ask(target, [("score", ids | {"hour": np.full(10, hour)}) for hour in (3, 999)], 16)


KINDS: Final[dict[str, Callable[[_Target], Counter[str]]]] = {
    "64 MiB to ServerLive and Check": _whole,
    "half-sent calls": _half,
    "one bag of 16 M ids": partial(_bags, bags=1, size=_BODY // 4 - 1000),
    "most ids that are taken": partial(_bags, bags=32, size=8192),
    "queries that fail": _poison,
}


def _main(kind: str, rest_port: str, grpc_port: str, token: str, rows: str) -> int:
    os.nice(19)
    target = _Target(int(rest_port), int(grpc_port), token, int(rows), threading.Event())

    def wait() -> None:
        sys.stdin.read()
        target.stop.set()

    threading.Thread(target=wait, daemon=True).start()
    print(READY, flush=True)
    print(json.dumps(KINDS[kind](target)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
