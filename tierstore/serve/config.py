"""The settings of ``tierstore serve``: one frozen description, each field with its help, a flag for each field."""

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from ..settings.sections import check_ranges, option
from ..system.checks import require_choice
from ..system.sizes import parse_size

_MAX_PORT: Final = 65_535
_PATHS: Final = ("store", "model", "warm_up", "record", "watch")
_NO_PATHS: Final = ("", "auto", "none")
_INT32_MAX: Final = (1 << 31) - 1
"""gRPC counts a message's bytes, and connections, in 32 bits."""
_STORE_NAME: Final = re.compile(r"[\w-]+")
"""No dot: of several stores, a model's name is the store's, a dot, and the model's own."""


def _port(default: int, text: str, low: int = 0) -> Any:
    return option(default, text, low=low, high=_MAX_PORT)


def _seconds(default: float, text: str) -> Any:
    return option(default, text, low=0, high=86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """One of a server's stores. ``name`` begins its models' names, if there are several stores; by default it is the
    folder's. Settings that are not empty or 0 stand in place of the server's own."""

    path: str
    name: str = ""
    model: str = ""
    ddr: int | str = ""
    dtype: Literal["", "stored", "float32", "float16", "bfloat16", "int8", "int4"] = ""
    dense: Literal["", "float32", "bfloat16", "int8"] = ""
    warm_up: str = ""
    record: str = ""
    watch: str = ""
    max_batch_samples: int = 0
    max_queue_samples: int = 0

    @property
    def called(self) -> str:
        return self.name or Path(self.path).absolute().name

    @property
    def settings(self) -> dict[str, Any]:
        """Those in place of the server's."""
        return {each.name: value for each in fields(self)[2:] if (value := getattr(self, each.name))}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Raises:
    ValueError: a value that cannot be; names it and what is accepted.
    """

    store: str = option("", "folder of the store; with --from it need not exist yet. For several: [[stores]] in a file")
    stores: tuple[StoreConfig, ...] = option((), "several stores, in a file: of each what StoreConfig has")
    model: str = option(
        "", "file of torch.export.save, served under the file's name; inputs named like features get their rows"
    )
    ddr: int | str = option(
        "50%", 'memory for rows: bytes, "2GiB", "50%" of the machine\'s or "5% of tables"; several stores share it'
    )
    dtype: Literal["stored", "float32", "float16", "bfloat16", "int8", "int4"] = option(
        "stored", "what rows are kept in memory as: as they are stored, or in fewer bits"
    )
    dense: Literal["float32", "bfloat16", "int8"] = option(
        "float32", "what the large linear layers of the model compute in"
    )
    policy: Literal["auto", "lru", "lfu", "tinylfu"] = option("auto", "which rows leave memory first")
    threads: int = option(
        0, "threads of a lookup and of the model; 0: the CPUs there are but one, shared by workers", low=0, high=1024
    )
    host: str = option("127.0.0.1", "address that REST and gRPC listen on; 0.0.0.0 for all")
    port: int = _port(8000, "port of REST; 0: any that is free")
    grpc_port: int = _port(8001, "port of gRPC; 0: any that is free, -1: no gRPC", -1)
    admin_host: str = option("127.0.0.1", "address of metrics and admin calls; others need --admin-token-file")
    admin_port: int = _port(
        8002, "their port; 0: any that is free, -1: none. With workers, worker i takes port + i", -1
    )
    workers: int = option(1, "processes that share the ports; each takes its part of --ddr", low=1, high=1024)
    max_batch_samples: int = option(4096, "samples of a batch, and of a request", low=1)
    max_queue_samples: int = option(65_536, "samples that may wait for a model; more are refused (503)", low=1)
    request_seconds: float = _seconds(10.0, "a request that gives no deadline has this one")
    grpc_body_bytes: int = option(
        4 << 20,
        "longest request over gRPC; 512 MiB over this many may be arriving at a time",
        low=1024,
        high=_INT32_MAX,
    )
    connections: int = option(1000, "connections at a time, of REST and of gRPC each", low=1, high=_INT32_MAX)
    idle_seconds: float = option(
        75.0, "time a REST connection may stay open without a request; longer than your proxy's", low=0.001, high=86_400
    )
    out_of_range: Literal["reject", "zero"] = option(
        "reject", "ids that are no rows are an error, or count as rows of zeros and are counted"
    )
    warm_up: str = option(
        "auto",
        'rows to have in memory before the server is ready: "auto": those of its last run, "none", or a trace of '
        "tierstore trace",
    )
    record: str = option("", "file to record in which rows are looked up, for tierstore plan; workers add their number")
    record_rate: float = option(
        0.01, "share of the rows that is recorded; less once the recording has 64 MiB", low=1e-9, high=1
    )
    follow_seconds: float = _seconds(0.05, "how often to look for a newer commit; 0: never")
    watch: str = option(
        "", "labelled rows, a file in the format of the run's data: the served model's log loss on them is measured"
    )
    watch_loss: float = option(
        0.01, "how far above the first version's, relatively, that loss may be without a warning", low=0, high=1e6
    )
    watch_rows: int = option(4096, "rows of it that are asked, from its start", low=1, high=1 << 20)
    sources: tuple[str, ...] = option(
        (),
        "follow this source of updates: a tierstore publish, the admin port of another replica, or a folder of a file "
        "server; the store is then a replica. Several times for several, of which each file comes from any",
    )
    canary: bool = option(False, "take versions on trial, and tell in the list of updates whether they fare worse")
    canary_seconds: int = option(60, "how long a version on trial is watched", low=1, high=3600)
    canary_loss: float = option(0.002, "by what share its log loss may grow", low=0)
    canary_errors: float = option(0.01, "how much larger its share of failed requests may be", low=0)
    canary_p99: float = option(1.0, "by what share its 99th percentile of latency may grow", low=0)
    grace_seconds: float = _seconds(30.0, "on SIGTERM, time for requests under way to finish")
    token_file: str = option("", "file with the bearer token that clients must show; health stays open")
    admin_token_file: str = option(
        "", "file with another, for the admin port; without it that port answers this machine and changes nothing"
    )
    tls_certificate: str = option("", "certificate chain in PEM, for TLS on all ports")
    tls_key: str = option("", "its key")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "what to log")

    def __post_init__(self) -> None:
        from ..cache.ddr import POLICIES  # which brings the compiler along
        from ..updates.fetch import parse_url

        if bool(self.store) == bool(self.stores):
            what = "store and stores are both named" if self.store else "no store is named"
            raise ValueError(f"{what}: tierstore serve --store DIR")
        parse_size(self.ddr, name="ddr")
        require_choice(self.policy, POLICIES, "policy")
        check_ranges(self)
        if self.max_queue_samples < self.max_batch_samples:
            raise ValueError(
                f"max_queue_samples={self.max_queue_samples} is below max_batch_samples={self.max_batch_samples}: "
                "a request of that many samples could never wait"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("TLS wants both tls_certificate and tls_key")
        is_open = self.admin_host not in ("127.0.0.1", "::1", "localhost") and self.admin_port >= 0
        if is_open and not self.admin_token_file:
            raise ValueError(
                f"admin_host={self.admin_host!r} lets other machines in: give an admin_token_file, or leave it at "
                "127.0.0.1"
            )
        if self.canary and not self.sources:
            raise ValueError("a canary is a replica: give --from URL, too")
        for url in self.sources:
            parse_url(url)
        if self.stores:
            self._require_apart()
        if self.workers > 1 and (self.sources or 0 in (self.port, self.grpc_port, self.admin_port)):
            raise ValueError("several workers share given ports and one store: not with --from, nor with a port of 0")
        if self.admin_port + self.workers - 1 > _MAX_PORT:
            raise ValueError(f"admin_port={self.admin_port} + {self.workers - 1}, of the last worker, is no port")

    def _require_apart(self) -> None:
        """ValueError unless the stores can be served alongside each other, under their names."""
        names = [each.called for each in self.stores]
        for name in names:
            if names.count(name) > 1 or not _STORE_NAME.fullmatch(name):
                rule = "of its own, of letters, digits, _ and -"
                raise ValueError(f"stores: {name!r}: a store has a name {rule}: set name")
        if len(names) > 1 and (self.model or self.record or self.watch):
            what = "model" if self.model else "record" if self.record else "watch"
            raise ValueError(f"{what} is of one store, and there are {len(names)}: set it in [[stores]]")
        if self.sources:
            raise ValueError("--from is of one store, named by store: start a server for each replica")
        self.by_store()

    def by_store(self) -> dict[str, "ServeConfig"]:
        """The settings of each store as of a server of its own, by the store's name. Paths are absolute: a server may
        outlive the folder in which it began."""
        found = {}
        for each in self.stores or (StoreConfig(path=self.store),):
            try:
                given = {"store": each.path, **each.settings}
                named = {name: str(given.get(name) or getattr(self, name)) for name in _PATHS}
                paths = {name: os.path.abspath(path) for name, path in named.items() if path not in _NO_PATHS}
                found[each.called] = replace(self, stores=(), **{**given, **paths})
            except ValueError as error:
                raise ValueError(f"stores: {each.called}: {error}") from None
        return found

    @property
    def num_threads(self) -> int:
        """Threads of a lookup and of the model; one core is left to the event loop."""
        from ..kernels.threads import default_threads

        return self.threads or max(1, (default_threads() - 1) // self.workers)

    @property
    def token(self) -> str | None:
        """What the clients' token file holds; ValueError if it cannot be read or is empty."""
        return self._read_token("token_file")

    @property
    def admin_token(self) -> str | None:
        """The operators'; ValueError also if it is the clients'."""
        found = self._read_token("admin_token_file")
        if found is not None and found == self.token:
            raise ValueError("admin_token_file holds the token of clients, who may change nothing; make another")
        return found

    def _read_token(self, name: str) -> str | None:
        from .credentials import read_token  # which brings asyncio along

        path = getattr(self, name)
        return read_token(path, name=name) if path else None
