"""Part "peers": the same lookups of one table's rows through the server and through Redis."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore

from ..common import Goal, Run, Spread, Table
from ..parts import Part, Told
from ..peers import loopback, redis_rows
from . import queries
from .clients import Answer, Client, RestClient
from .http2 import GrpcClient
from .load import Load, Quantiles, Stream, closed_loop, open_loop, poisson
from .server import HOST, ServerProcess
from .shape import ROWS_TABLE, rows_store

__all__ = ["PART"]

_CHUNK: Final = 500_000
_REDIS: Final = "Redis, pipelined MGET"
_LIMIT: Final = "the same bytes over loopback, nothing looked up"
_NUM_REQUESTS: Final = 600
# In lookups of rows each id counts as a sample.
_LARGE: Final = ("--max-batch-samples", "32768", "--max-queue-samples", "262144")


class _Way(NamedTuple):
    """A server that rows are asked of.

    Attributes:
        client: given how many connections and ids a sample.
        encode: a query's request, given also ids a sample.
        cpu_seconds: of the server so far.
        rows: an answer's rows, side by side, given the number of rows; None if there are none.
    """

    name: str
    client: Callable[[int, int], Client]
    encode: Callable[[queries.Query, int], bytes]
    cpu_seconds: Callable[[], float]
    rows: Callable[[bytes, int], bytes] | None


def _chunks(request: Run) -> Iterator[Any]:
    """All rows of the store, some at a time."""
    with tierstore.open(rows_store(request.folder, request.config), mode="r", ddr="64MiB") as store:
        table = store[ROWS_TABLE]
        for first in range(0, table.config.num_embeddings, _CHUNK):
            yield table.read(torch.arange(first, min(first + _CHUNK, table.config.num_embeddings))).numpy()


def _redis(request: Run, stack: contextlib.ExitStack) -> _Way:
    print("loading Redis", flush=True)
    server = stack.enter_context(redis_rows.RedisServer(_chunks(request), log=request.folder / "redis.log"))
    dim = request.config["dim"]
    return _Way(
        _REDIS,
        lambda connections, features: redis_rows.RedisClient(server.port, connections, commands=features, dim=dim),
        lambda query, features: redis_rows.encoded_mget(query.inputs["ids"], features),
        server.cpu_seconds,
        lambda body, _: redis_rows.rows_of(body, dim),
    )


def _tierstore(request: Run, divisor: int, stack: contextlib.ExitStack) -> list[_Way]:
    config = request.config
    size_bytes = config["peer_rows"] * config["dim"] * 4
    ddr = max(size_bytes // divisor, 8 << 20) if divisor else 2 * size_bytes + (64 << 20)
    store = rows_store(request.folder, config)
    flags = ("--warm-up", "none", *_LARGE)
    server = stack.enter_context(ServerProcess(store, str(ddr), log=request.folder / "serve.log", flags=flags))

    def last(body: bytes, count: int) -> bytes:
        return body[-count * config["dim"] * 4 :]

    held = f"memory for a {divisor}th of the rows" if divisor else "all rows in memory"
    return [
        _Way(
            f"tierstore, REST, {held}",
            lambda connections, _: RestClient(HOST, server.rest_port, connections),
            lambda query, _: queries.encoded_rest(query),
            server.cpu_seconds,
            last,
        ),
        _Way(
            f"tierstore, gRPC, {held}",
            lambda connections, _: GrpcClient(HOST, server.grpc_port, connections),
            lambda query, _: queries.encoded_grpc(query),
            server.cpu_seconds,
            last,
        ),
    ]


def _limit(request: Run, stack: contextlib.ExitStack) -> _Way:
    server = stack.enter_context(loopback.LoopbackServer())
    row_bytes = request.config["dim"] * 4

    def encode(query: queries.Query, _: int) -> bytes:
        ids = query.inputs["ids"]
        return loopback.encoded(ids.nbytes, len(ids) * row_bytes)

    return _Way(_LIMIT, lambda connections, _: server.client(connections), encode, server.cpu_seconds, None)


class _Lookups:
    """Lookups of so many ids a sample, of every way the same."""

    def __init__(self, request: Run, features: int, ways: list[_Way]) -> None:
        self._config, self._features, self._ways = request.config, features, ways
        self._generator = np.random.default_rng(request.config["seed"] + features)
        law = queries.Rows(ROWS_TABLE, request.config["peer_rows"], request.config["exponent"], features)
        self._law = law
        self.rows_per_query = statistics.mean(queries.QUERY_SIZES) * features

    def _requests(self, way: _Way, drawn: list[queries.Query]) -> list[bytes]:
        return [way.encode(query, self._features) for query in drawn]

    def check(self, expected: Any) -> None:
        """RuntimeError unless every way answers with the rows themselves."""
        query = self._law.draw(self._generator, 1)[0]
        wanted = expected[query.inputs["ids"]].tobytes()
        for way in self._ways:
            answers: list[Answer] = []
            client, request = way.client(1, self._features), way.encode(query, self._features)
            stream = Stream(client, [request], np.zeros(1), lambda _, answer, to=answers: to.append(answer))  # type: ignore[misc]
            open_loop([stream])
            if answers[0].error:
                raise RuntimeError(f"{way.name}: {answers[0].error}")
            if way.rows and way.rows(answers[0].body, len(query.inputs["ids"])) != wanted:
                raise RuntimeError(f"{way.name}: other rows than those in the store")

    def warm(self) -> None:
        """Bring in what the memory holds, and have every kernel compiled."""
        for way in self._ways:
            for _ in range(2):
                requests = self._requests(way, self._law.draw(self._generator, _NUM_REQUESTS))
                closed_loop(way.client(2, self._features), requests, at_once=2, seconds=self._config["peer_seconds"])

    def _closed(self, way: _Way, connections: int, requests: list[bytes]) -> dict[str, Any]:
        cpu = way.cpu_seconds()
        client = way.client(connections, self._features)
        seconds = self._config["peer_seconds"]
        load = closed_loop(client, requests, at_once=connections, seconds=seconds)
        return {
            "connections": connections,
            "queries_per_s": len(load.latency) / load.seconds,
            **_told(load, Quantiles.of(load.latency), way.cpu_seconds() - cpu),
        }

    def highest(self) -> dict[str, list[dict[str, Any]]]:
        """Of each way, by connections: as fast as it answers; the ways take turns."""
        found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in self._ways}
        for _ in range(self._config["repetitions"]):
            for connections in self._config["peer_connections"]:
                drawn = self._law.draw(self._generator, _NUM_REQUESTS)
                for way in self._ways:
                    found[way.name].append(self._closed(way, connections, self._requests(way, drawn)))
        return found

    def common(self, rate: float) -> dict[str, list[dict[str, Any]]]:
        """Of each way, at one rate of queries, the same queries at the same times."""
        found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in self._ways}
        for _ in range(self._config["repetitions"]):
            intended = poisson(self._generator, rate, self._config["peer_seconds"])
            drawn = self._law.draw(self._generator, _NUM_REQUESTS)
            for way in self._ways:
                requests = self._requests(way, drawn)
                cycled = [requests[index % len(requests)] for index in range(len(intended))]
                cpu = way.cpu_seconds()
                client = way.client(max(self._config["peer_connections"]), self._features)
                load = open_loop([Stream(client, cycled, intended)])[0]
                lead = self._config["peer_seconds"] / 10
                found[way.name].append(_told(load, Quantiles.of(load.since(lead)), way.cpu_seconds() - cpu))
        return found


def _told(load: Load, quantiles: Quantiles, cpu_seconds: float) -> dict[str, Any]:
    return {
        **quantiles._asdict(),
        "failed": load.num_failed,
        "errors": load.errors,
        "generator_cores": load.cores,
        "server_cores": cpu_seconds / load.seconds,
    }


def _best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians at the number of connections with the highest rate."""
    by_connections = {each["connections"]: [other for other in found if other["connections"] == each["connections"]]
                      for each in found}  # fmt: skip
    best = max(by_connections.values(), key=lambda each: statistics.median(one["queries_per_s"] for one in each))
    return _medians(best) | {"spread": Spread.of([each["queries_per_s"] for each in best]).__dict__}


def _medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in found[0].items() if isinstance(value, int | float)]
    return {name: statistics.median(each[name] for each in found) for name in names}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    rows_store(request.folder, config)
    with contextlib.ExitStack() as stack:
        ways = [way for divisor in config["peer_divisors"] for way in _tierstore(request, divisor, stack)]
        ways.append(_limit(request, stack))
        has_redis = redis_rows.is_there()
        if has_redis:
            ways.append(_redis(request, stack))
        expected = np.concatenate(list(_chunks(request)))
        measured = [
            _of_features(request, features, ways, expected) | {"times": times}
            for features, times in zip(config["peer_features"], config["peer_times"], strict=True)
        ]
    return {"has_redis": has_redis, "rows": config["peer_rows"], "dim": config["dim"], "lookups": measured}


def _of_features(request: Run, features: int, ways: list[_Way], expected: Any) -> dict[str, Any]:
    lookups = _Lookups(request, features, ways)
    lookups.check(expected)
    lookups.warm()
    highest = {name: _best(found) for name, found in lookups.highest().items()}
    rate = request.config["peer_share"] * min(each["queries_per_s"] for each in highest.values())
    common = {name: _medians(found) for name, found in lookups.common(rate).items()}
    for name, best in highest.items():
        print(f"  {features} ids a sample, {name}: {best['queries_per_s']:.0f} queries/s, then p99 "
              f"{common[name]['p99']:.1f} ms at {rate:.0f}/s", flush=True)  # fmt: skip
    return {
        "features": features,
        "rows_per_query": lookups.rows_per_query,
        "rate": rate,
        "highest": highest,
        "common": common,
    }


def _table(measured: dict[str, Any], figures: dict[str, Any]) -> Table:
    per_query = measured["rows_per_query"]
    rows = []
    for name, best in measured["highest"].items():
        common = measured["common"][name]
        rows.append(
            [
                name, f"{per_query * best['queries_per_s'] / 1e6:.2f} M", f"{best['p99']:.1f}",
                f"{best['server_cores']:.2f}", f"{best['generator_cores']:.2f}", f"{common['p50']:.2f}",
                f"{common['p99']:.2f}", f"{common['server_cores']:.2f}", f"{int(best['failed'] + common['failed'])}",
            ]
        )  # fmt: skip
    return Table(
        title=(
            f"lookups of {per_query:,.0f} rows a query on average, {figures['rows']:,} rows of {figures['dim']}: as "
            f"fast as answered, and all at {per_query * measured['rate'] / 1e6:.2f} M rows/s"
        ),
        columns=["asked of", "highest rows/s", "p99 ms then", "server cores", "generator cores", "p50 ms in common",
                 "p99 ms in common", "server cores", "failed"],
        rows=rows,
    )  # fmt: skip


def _goals(measured: dict[str, Any]) -> list[Goal]:
    highest, common, wanted = measured["highest"], measured["common"], measured["times"]
    per_query = measured["rows_per_query"]
    own = max((name for name in highest if "all rows" in name), key=lambda name: highest[name]["queries_per_s"])
    times = highest[own]["queries_per_s"] / highest[_REDIS]["queries_per_s"]
    tail = common[own]["p99"] / common[_REDIS]["p99"]
    return [
        Goal(name=f"{per_query:,.0f} rows a query, {own}: rows/s over Redis's", value=times, at_least=wanted),
        Goal(name=f"{per_query:,.0f} rows a query, {own}: p99 at the same load over Redis's", value=tail, at_most=1),
    ]


def _tell(figures: dict[str, Any]) -> Told:
    has_redis = figures["has_redis"]
    return Told(
        tables=[_table(measured, figures) for measured in figures["lookups"]],
        goals=[goal for measured in figures["lookups"] for goal in _goals(measured)] if has_redis else [],
        notes=[
            "Peers: one table, ids by Zipf's law, a query's ids in one request; Redis 7 holds each row as a string of "
            "its bytes under a key of four bytes, nothing persistent, asked by MGETs of one feature's ids each, sent "
            "without waiting. The clients send bytes made beforehand over loopback and take the answer's bytes as "
            "they are; to gather Redis's rows from between their lengths is not counted. Before, every way's rows "
            "were compared with the store's. The ways take turns; medians. The limit: a server on the same event loop "
            "that takes as many bytes as ids have, and sends as many as rows have."
            if has_redis
            else "Peers: there was no redis-server on this machine."
        ],
    )


PART: Final = Part(_measure, _tell)
