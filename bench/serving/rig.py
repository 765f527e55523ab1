"""A ranking server under load: what the parts of the benchmark share."""

import re
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tierstore.plan.measure import page_cache

from ..child import HOST, Child
from ..common import Run
from ..data import ROOT
from . import queries
from .clients import RestClient, SocketClient
from .http2 import GrpcClient
from .load import closed_loop, poisson
from .shape import kaggle_rows, kaggle_store

_READY: Final = re.compile(r"ready: REST http://[^:]+:(\d+), gRPC [^:]+:(\d+), \w+ http://[^:]+:(\d+)")


class ServerProcess(Child):
    """``tierstore serve``, of the tree at ``root``, on ports that are free; ready when this returns."""

    needs_signal = True

    def __init__(self, store: Path, ddr: object, *, log: Path, flags: Sequence[str] = (), root: Path = ROOT) -> None:
        ports = [word for name in ("port", "grpc-port", "admin-port") for word in (f"--{name}", "0")]
        command = [sys.executable, "-m", "tierstore", "serve", "--store", store, "--ddr", ddr, *ports]
        super().__init__([*command, "--log-level", "warning", *flags], log=log, cwd=root)
        try:
            found = _READY.search(line := self.line())
            assert found, f"the server said {line!r}"
        except BaseException:
            self.kill()
            raise
        self.rest_port, self.grpc_port, self._admin_port = map(int, found.groups())

    def client(self, protocol: str, connections: int) -> SocketClient:
        """Over "rest" or "grpc"."""
        if protocol == "grpc":
            return GrpcClient(HOST, self.grpc_port, connections)
        return RestClient(HOST, self.rest_port, connections)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of its series of that name that have the label."""
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(each.split()[-1]) for each in lines if each.startswith(f"{name}{{") and label in each)

    def used(self) -> Any:
        """float64 [3] so far: seconds of processors, hits of host memory, and rows that were looked up in it."""
        hits, misses = (self.metric(f"tierstore_tier_{name}_total", 'tier="ddr"') for name in ("hits", "misses"))
        return np.array([self.cpu_seconds(), hits, hits + misses])


class Rig:
    """The store, its file of rows in the page cache, servers of it, and queries for them."""

    def __init__(self, request: Run) -> None:
        self.config: Mapping[str, Any] = request.config
        self.store: Path = kaggle_store(request.folder, request.config)
        rows = kaggle_rows(request.config)
        self.ddr_bytes = sum(rows) * 4 * int(self.config["dim"]) // int(self.config["ddr_divisor"])
        self.rows_file = self.store / "rows.lmdb"
        page_cache.warm(self.rows_file)
        self._log = request.folder / "serve.log"
        self._queries = queries.Ranking(rows, self.config["exponent"])
        self._generator = np.random.default_rng(self.config["seed"])

    def server(self, root: Path = ROOT) -> ServerProcess:
        """One that begins with empty memory."""
        ddr = max(self.ddr_bytes, 8 << 20)  # a small store's tables need more than their own tenth
        return ServerProcess(self.store, ddr, log=self._log, flags=("--warm-up", "none"), root=root)

    def requests(self, count: int, protocol: str, *, sizes_from: np.random.Generator | None = None) -> list[bytes]:
        """So many ranking queries that were never asked before."""
        drawn = self._queries.draw(self._generator, count, sizes_from=sizes_from)
        return list(map(queries.ENCODED[protocol], drawn))

    def stream(
        self, server: ServerProcess, protocol: str, rate: float, seconds: float, *, pattern: Sequence[int]
    ) -> tuple[SocketClient, list[bytes], Any]:
        """What ``open_loop`` takes. Queries' times, but for the rate, and sizes follow from the numbers of ``pattern``;
        their ids are drawn again."""
        times, sizes = np.random.default_rng(pattern).spawn(2)
        intended, client = poisson(times, rate, seconds), server.client(protocol, self.config["connections"])
        return client, self.requests(len(intended), protocol, sizes_from=sizes), intended

    def warm(self, server: ServerProcess, seconds: float | None = None) -> None:
        """Ask as fast as the server answers: ``warm_seconds``, until memory holds the hot rows, or as given."""
        end = time.monotonic() + (self.config["warm_seconds"] if seconds is None else seconds)
        while (left := end - time.monotonic()) > 0:
            fresh = self.requests(400, "rest")  # every few seconds: asked again, the same ones would only hit
            closed_loop(server.client("rest", 4), fresh, at_once=4, seconds=max(0.1, min(left, 1.5)))
