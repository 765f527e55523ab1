"""Part "fixed": what a request costs whatever it asks for: one row that is in memory, beside the bare libraries."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from ..common import Goal, Run, Table
from ..parts import Part, Told
from ..peers.bare import BareServer
from . import queries
from .clients import BlockingGrpc, BlockingRest, RestClient
from .http2 import GrpcClient
from .load import closed_loop
from .server import HOST, ServerProcess
from .shape import ROWS_TABLE, rows_store

__all__ = ["PART"]

_MOST_US: Final = {"rest": 150.0, "grpc": 300.0}
_TIERSTORE: Final = "tierstore"
_BARE: Final = {"rest": "uvicorn's connections, nothing done", "grpc": "grpc.aio, nothing done"}


class _Way(NamedTuple):
    name: str
    protocol: str
    port: int
    cpu_seconds: Callable[[], float]


def _busy(way: _Way, request: bytes, config: Any) -> tuple[float, float]:
    """(microseconds a request, those of the server's cores) of a server that is never idle."""
    connections, seconds = config["fixed_connections"], config["fixed_seconds"]
    client = (GrpcClient if way.protocol == "grpc" else RestClient)(HOST, way.port, connections)
    cpu = way.cpu_seconds()
    load = closed_loop(client, [request], at_once=connections, seconds=seconds)
    if load.num_failed:
        raise RuntimeError(f"{way.name}: {load.errors}")
    return 1e6 * load.seconds / len(load.latency), 1e6 * (way.cpu_seconds() - cpu) / len(load.latency)


def _alone(way: _Way, request: bytes, config: Any) -> float:
    """Microseconds until a blocking client, which asks for nothing else, has its answer."""
    client = BlockingGrpc(HOST, way.port) if way.protocol == "grpc" else BlockingRest(HOST, way.port)
    latencies = []
    try:
        for _ in range(config["fixed_queries"]):
            start = time.perf_counter()
            answer = client.ask(request)
            latencies.append(time.perf_counter() - start)
            if answer.error:
                raise RuntimeError(answer.error)
    finally:
        client.close()
    return 1e6 * statistics.median(latencies)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    store = rows_store(request.folder, config)
    ddr = 2 * config["peer_rows"] * config["dim"] * 4 + (64 << 20)
    query = queries.Query(f"rows.{ROWS_TABLE}", {"ids": np.zeros(1, np.int64)})
    encoded = {"rest": queries.encoded_rest(query), "grpc": queries.encoded_grpc(query)}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            ServerProcess(store, str(ddr), log=request.folder / "serve.log", flags=("--warm-up", "none"))
        )
        ways = []
        for protocol, port in (("rest", server.rest_port), ("grpc", server.grpc_port)):
            bare = stack.enter_context(BareServer(protocol))
            ways += [
                _Way(_TIERSTORE, protocol, port, server.cpu_seconds),
                _Way(_BARE[protocol], protocol, bare.port, bare.cpu_seconds),
            ]
        found: dict[_Way, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for turn in range(1 + config["repetitions"]):
            for way in ways:
                once = (*_busy(way, encoded[way.protocol], config), _alone(way, encoded[way.protocol], config))
                found[way] += [once] if turn else []  # the first warms up
    names = ("busy_us", "cpu_us", "alone_us")
    return {
        "ways": [
            {"name": way.name, "protocol": way.protocol}
            | {name: statistics.median(values) for name, values in zip(names, zip(*each, strict=True), strict=True)}
            for way, each in found.items()
        ],
        "connections": config["fixed_connections"],
    }


def _tell(figures: dict[str, Any]) -> Told:
    ways = figures["ways"]
    columns = ["protocol", "server", "us a request, never idle", "of the server's cores", "us alone, client included"]
    rows = [[way["protocol"], way["name"], *(f"{way[name]:,.0f}" for name in ("busy_us", "cpu_us", "alone_us"))]
            for way in ways]  # fmt: skip
    own = [way for way in ways if way["name"] == _TIERSTORE]
    return Told(
        tables=[Table(title="what a request costs: one row, in memory", columns=columns, rows=rows)],
        goals=[
            Goal(
                name=f"{way['protocol']}: us a request of one row, never idle",
                value=way["busy_us"],
                at_most=_MOST_US[way["protocol"]],
            )
            for way in own
        ],
        notes=[
            f"Fixed costs: never idle means {figures['connections']} connections that each ask again once they are "
            "answered, from another core; alone, one blocking client. The bare servers are the libraries that the "
            "server speaks the protocols with, in the same event loop; they read the request and send 64 bytes. The "
            "servers take turns; medians."
        ],
    )


PART: Final = Part(_measure, _tell)
