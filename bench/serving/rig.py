"""A ranking server under load: what the parts of the benchmark share."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.plan.measure import page_cache

from .. import device
from ..child import HOST
from ..common import Run
from . import queries
from .clients import RestClient, SocketClient
from .http2 import GrpcClient
from .load import Stream, closed_loop, poisson
from .server import ServerProcess
from .shape import kaggle_rows, kaggle_store, table_bytes
from .trainer import TrainerProcess

__all__ = ["HitRate", "Rig"]

_ROWS_FILE: Final = "rows.lmdb"


class HitRate(NamedTuple):
    """Of host memory, at one time."""

    hits: int
    unique: int

    @classmethod
    def of(cls, server: ServerProcess) -> "HitRate":
        tier = next(each for each in server.status()["tiers"] if each["name"] == "ddr")
        return cls(tier["hits"], tier["unique"])

    def minus(self, earlier: "HitRate") -> "HitRate":
        return HitRate(self.hits - earlier.hits, self.unique - earlier.unique)


class Rig:
    """The store, servers of it, and queries for them."""

    def __init__(self, request: Run) -> None:
        self.config: Mapping[str, Any] = request.config
        self.folder = request.folder
        self.store: Path = kaggle_store(request.folder, request.config)
        self.ddr_bytes = table_bytes(request.config) // int(request.config["ddr_divisor"])
        self.log = request.folder / "serve.log"
        self._queries = queries.Ranking(kaggle_rows(request.config), request.config["exponent"])
        self.generator = np.random.default_rng(request.config["seed"])

    @property
    def rows_file(self) -> Path:
        return self.store / _ROWS_FILE

    def prepare(self) -> None:
        """Put the file of rows into the page cache, or out of it, as the configuration says. Before a server starts."""
        (page_cache.drop if self.config["page_cache"] == "cold" else page_cache.warm)(self.rows_file)

    def device_reads_per_s(self) -> float | None:
        """What the disk itself gives now."""
        return device.reads_per_s(self.rows_file)

    def server(self, *flags: str) -> ServerProcess:
        # A small store's tables need more than their own tenth.
        ddr = max(self.ddr_bytes, 8 << 20)
        return ServerProcess(self.store, ddr, log=self.log, flags=flags)

    def client(self, server: ServerProcess, protocol: str) -> SocketClient:
        if protocol == "grpc":
            return GrpcClient(HOST, server.grpc_port, self.config["connections"])
        return RestClient(HOST, server.rest_port, self.config["connections"])

    def requests(self, count: int, protocol: str, *, sizes_from: np.random.Generator | None = None) -> list[bytes]:
        """So many ranking queries that were never asked before."""
        encode = queries.encoded_grpc if protocol == "grpc" else queries.encoded_rest
        return [encode(query) for query in self._queries.draw(self.generator, count, sizes_from=sizes_from)]

    def stream(
        self,
        server: ServerProcess,
        protocol: str,
        rate: float,
        seconds: float,
        *,
        pattern: Sequence[int] = (),
    ) -> Stream:
        """Args:
        pattern: numbers that queries' times, but for the rate, and sizes follow from; their ids are drawn again.
        """
        times, sizes = np.random.default_rng(pattern).spawn(2) if pattern else (self.generator, self.generator)
        intended = poisson(times, rate, seconds)
        requests = self.requests(len(intended), protocol, sizes_from=sizes)
        return Stream(self.client(server, protocol), requests, intended)

    def trainer(self) -> TrainerProcess:
        """One that goes on with the store."""
        return TrainerProcess(self.store, self.config["update_rows"], nice=self.config["trainer_nice"], log=self.log)

    def warm(self, server: ServerProcess, seconds: float | None = None) -> None:
        """Ask as fast as the server answers: ``warm_seconds``, until memory holds the hot rows, or as given."""
        end = time.monotonic() + (self.config["warm_seconds"] if seconds is None else seconds)
        while (left := end - time.monotonic()) > 0:
            # Fresh requests every few seconds: asked again, the same ones would only hit.
            requests = self.requests(400, "rest")
            client = RestClient(HOST, server.rest_port, 4)
            closed_loop(client, requests, at_once=4, seconds=max(0.1, min(left, 1.5)))
