"""Part "peers": the same lookups of one table's rows through the server and through Redis."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

import tierstore

from ..child import Child
from ..common import Goal, Part, Report, Run, Table, median_of
from ..peers import redis_rows
from ..workload import chunks
from . import queries
from .clients import Answer, SocketClient
from .load import Quantiles, closed_loop, open_loop
from .rig import ServerProcess
from .shape import ROWS_TABLE, rows_store

_REDIS: Final = "Redis, pipelined MGET"
_NUM_REQUESTS: Final = 600
# In lookups of rows each id counts as a sample.
_FLAGS: Final = ("--warm-up", "none", "--max-batch-samples", "32768", "--max-queue-samples", "262144")
_TIMES: Final = {26: 2.0, 1: 1.2}
"""Redis's rows/s that are asked for, by ids a sample."""


class _Way(NamedTuple):
    """A server that rows are asked of. ``client`` is given how many connections and ids a sample, ``encode`` a query
    and ids a sample, ``rows`` an answer and how many rows it has side by side."""

    name: str
    server: Child
    client: Callable[[int, int], SocketClient]
    encode: Callable[[queries.Query, int], bytes]
    rows: Callable[[bytes, int], bytes]


def _rows(request: Run) -> Iterator[Any]:
    """All rows of the store, some at a time."""
    with tierstore.open(rows_store(request.folder, request.config), mode="r", ddr="64MiB") as store:
        for ids in chunks(store[ROWS_TABLE]):
            yield store[ROWS_TABLE].read(ids).numpy()


def _redis(request: Run, stack: contextlib.ExitStack) -> _Way:
    server = stack.enter_context(redis_rows.RedisServer(_rows(request), log=request.folder / "redis.log"))
    dim = request.config["dim"]
    return _Way(
        _REDIS,
        server,
        lambda connections, features: redis_rows.RedisClient(server.port, connections, commands=features, dim=dim),
        lambda query, features: redis_rows.encoded_mget(query.inputs["ids"], features),
        lambda body, _: redis_rows.rows_of(body, dim),
    )


def _tierstore(request: Run, divisor: int, stack: contextlib.ExitStack) -> list[_Way]:
    config = request.config
    size_bytes = config["peer_rows"] * config["dim"] * 4
    ddr = max(size_bytes // divisor, 8 << 20) if divisor else 2 * size_bytes + (64 << 20)
    store, log = rows_store(request.folder, config), request.folder / "serve.log"
    server = stack.enter_context(ServerProcess(store, ddr, log=log, flags=_FLAGS))

    def last(body: bytes, count: int) -> bytes:
        return body[-count * config["dim"] * 4 :]

    held = f"memory for a {divisor}th of the rows" if divisor else "all rows in memory"

    def way(name: str, shown: str) -> _Way:
        return _Way(
            f"tierstore, {shown}, {held}", server, lambda connections, _: server.client(name, connections),
            lambda query, _: queries.ENCODED[name](query), last,
        )  # fmt: skip

    return [way("rest", "REST"), way("grpc", "gRPC")]


def _check(way: _Way, query: queries.Query, features: int, expected: Any) -> None:
    """RuntimeError unless it answers with the rows themselves."""
    answers, ids = list[Answer](), query.inputs["ids"]
    request = way.encode(query, features)
    open_loop(way.client(1, features), [request], np.zeros(1), lambda _, answer: answers.append(answer))
    if answers[0].error or way.rows(answers[0].body, len(ids)) != expected[ids].tobytes():
        raise RuntimeError(f"{way.name}: {answers[0].error or 'other rows than those in the store'}")


def _turn(way: _Way, connections: int, features: int, drawn: list[queries.Query], seconds: float) -> dict[str, Any]:
    """As fast as it answers."""
    requests, cpu = [way.encode(query, features) for query in drawn], way.server.cpu_seconds()
    load = closed_loop(way.client(connections, features), requests, at_once=connections, seconds=seconds)
    return {
        "queries_per_s": len(load.since(0)) / load.seconds,
        **Quantiles.of(load.since(0))._asdict(),
        "failed": load.num_failed,
        "generator_cores": load.cores,
        "server_cores": (way.server.cpu_seconds() - cpu) / load.seconds,
    }


def _highest(config: dict[str, Any], features: int, ways: list[_Way], expected: Any) -> dict[str, dict[str, Any]]:
    """Of each way the medians at that number of connections with which it is fastest; the ways take turns."""
    generator = np.random.default_rng(config["seed"] + features)
    law = queries.Rows(ROWS_TABLE, config["peer_rows"], config["exponent"], features)
    query, seconds = law.draw(generator, 1)[0], config["peer_seconds"]
    for way in ways:
        _check(way, query, features, expected)
    found = {way.name: {each: list[dict[str, Any]]() for each in config["peer_connections"]} for way in ways}
    for turn in range(1 + config["repetitions"]):
        for connections in config["peer_connections"]:
            drawn = law.draw(generator, _NUM_REQUESTS)
            for way in ways:
                once = _turn(way, connections, features, drawn, seconds)
                found[way.name][connections] += [once] if turn else []  # the first warms up
    medians = {name: [median_of(each) for each in by_count.values()] for name, by_count in found.items()}
    return {name: max(each, key=lambda one: float(one["queries_per_s"])) for name, each in medians.items()}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, measured = request.config, []
    rows_store(request.folder, config)
    with contextlib.ExitStack() as stack:
        ways = [way for divisor in config["peer_divisors"] for way in _tierstore(request, divisor, stack)]
        ways.append(_redis(request, stack))
        expected = np.concatenate(list(_rows(request)))
        for features in config["peer_features"]:
            rows = statistics.mean(queries.QUERY_SIZES) * features
            highest = _highest(config, features, ways, expected)
            measured.append({"features": features, "rows_per_query": rows, "highest": highest})
    return {"rows": config["peer_rows"], "dim": config["dim"], "lookups": measured}


def _table(measured: dict[str, Any], figures: dict[str, Any]) -> Table:
    per_query = measured["rows_per_query"]
    rows = [
        [
            name, f"{per_query * best['queries_per_s'] / 1e6:.2f} M", f"{best['p50']:.1f}", f"{best['p99']:.1f}",
            f"{best['server_cores']:.2f}", f"{best['generator_cores']:.2f}", f"{int(best['failed'])}",
        ]
        for name, best in measured["highest"].items()
    ]  # fmt: skip
    title = f"lookups of {per_query:,.0f} rows a query on average, {figures['rows']:,} rows of {figures['dim']}"
    columns = ["asked of", "highest rows/s", "p50 ms", "p99 ms", "server cores", "generator cores", "failed"]
    return Table(title, columns, rows)


def _goal(measured: dict[str, Any]) -> Goal:
    rates = {name: each["queries_per_s"] for name, each in measured["highest"].items()}
    own = max((name for name in rates if "all rows" in name), key=lambda name: float(rates[name]))
    name = f"{measured['rows_per_query']:,.0f} rows a query, {own}: rows/s over Redis's"
    return Goal(name, rates[own] / rates[_REDIS], at_least=_TIMES[measured["features"]])


def _tell(figures: dict[str, Any]) -> Report:
    note = (
        "Peers: one table, ids by Zipf's law, a query's ids in one request; Redis 7 holds each row as a string of its "
        "bytes under a key of four bytes, nothing persistent, asked by MGETs of one feature's ids each, sent without "
        "waiting. The clients send bytes made beforehand over loopback and take the answer's bytes as they are; to "
        "gather Redis's rows from between their lengths is not counted. Before, every way's rows were compared with "
        "the store's. The ways take turns, as fast as they answer; medians."
    )
    lookups = figures["lookups"]
    goals = [_goal(measured) for measured in lookups if _REDIS in measured["highest"]]
    return Report([_table(measured, figures) for measured in lookups], goals, [note] if goals else [])


PART: Final = Part(_measure, _tell)
