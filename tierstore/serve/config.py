"""The settings of ``tierstore serve``: one frozen description, each field with its help, a flag for each field."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from ..settings.sections import check_ranges, option
from ..system.checks import require_choice
from ..system.sizes import parse_size
from .bearer_token import read_token

_MAX_PORT: Final = 65_535
_INT32_MAX: Final = (1 << 31) - 1
"""gRPC counts a message's bytes, and connections, in 32 bits."""


def _port(default: int, text: str, low: int = 0) -> Any:
    return option(default, text, low=low, high=_MAX_PORT)


def _seconds(default: float, text: str) -> Any:
    return option(default, text, low=0, high=86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Raises:
    ValueError: a value that cannot be; names it and what is accepted.
    """

    store: str = option("", "folder of the store; with --updates it need not exist yet")
    model: str = option(
        "", "file of torch.export.save, served under the file's name; inputs named like features get their rows"
    )
    ddr: int | str = option("50%", 'memory for rows: bytes, "2GiB", "50%" of the machine\'s or "5% of tables"')
    dtype: Literal["stored", "float32", "float16", "bfloat16", "int8", "int4"] = option(
        "stored", "what rows are kept in memory as: as they are stored, or in fewer bits"
    )
    dense: Literal["float32", "int8"] = option("float32", "what the large linear layers of the model compute in")
    policy: Literal["auto", "lru", "lfu", "tinylfu"] = option("auto", "which rows leave memory first")
    threads: int = option(
        0, "threads of a lookup and of the model; 0: the CPUs there are but one, shared by workers", low=0, high=1024
    )
    host: str = option("127.0.0.1", "address that REST and gRPC listen on; 0.0.0.0 for all")
    port: int = _port(8000, "port of REST; 0: any that is free")
    grpc_port: int = _port(8001, "port of gRPC; 0: any that is free, -1: no gRPC", -1)
    admin_host: str = option(
        "127.0.0.1", "address of status page, metrics and admin calls; others need --admin-token-file"
    )
    admin_port: int = _port(
        8002, "their port; 0: any that is free, -1: none. With workers, worker i takes port + i", -1
    )
    workers: int = option(1, "processes that share the ports; each takes its part of --ddr", low=1, high=1024)
    max_batch_samples: int = option(4096, "samples of a batch, and of a request", low=1)
    max_queue_samples: int = option(65_536, "samples that may wait for a model; more are refused (503)", low=1)
    max_queue_requests: int = option(4096, "requests that may wait for a model; more are refused (503)", low=1)
    request_seconds: float = _seconds(10.0, "a request that gives no deadline has this one")
    body_bytes: int = option(64 << 20, "longest request over REST", low=1024, high=_INT32_MAX)
    grpc_body_bytes: int = option(
        4 << 20,
        "longest request over gRPC; 512 MiB over this many may be arriving at a time",
        low=1024,
        high=_INT32_MAX,
    )
    connections: int = option(1000, "connections at a time, of REST and of gRPC each", low=1, high=_INT32_MAX)
    receive_seconds: float = option(30.0, "time for a request to arrive whole", low=0.001, high=86_400)
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
    updates: bool = option(
        False, "take updates of tierstore publish on the admin port; the store is then a replica; with an admin token"
    )
    grace_seconds: float = _seconds(30.0, "on SIGTERM, time for requests under way to finish")
    token_file: str = option("", "file with the bearer token that clients must show; health stays open")
    admin_token_file: str = option(
        "", "file with another, for the admin port; without it that port answers this machine and changes nothing"
    )
    tls_certificate: str = option("", "certificate chain in PEM, for TLS on all ports")
    tls_key: str = option("", "its key")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "what to log")
    log_text: bool = option(False, "log plain lines instead of JSON")

    def __post_init__(self) -> None:
        from ..cache import POLICIES  # which brings the compiler along

        if not self.store:
            raise ValueError("no store is named: tierstore serve --store DIR")
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
        if self.updates and not self.admin_token_file:
            raise ValueError("updates come by the admin port, with a token: give an admin_token_file")
        if self.workers > 1 and (self.updates or 0 in (self.port, self.grpc_port, self.admin_port)):
            raise ValueError("several workers share given ports and one store: not with updates, nor with a port of 0")
        if self.admin_port + self.workers - 1 > _MAX_PORT:
            raise ValueError(f"admin_port={self.admin_port} + {self.workers - 1}, of the last worker, is no port")

    @property
    def num_threads(self) -> int:
        """Threads of a lookup and of the model; one core is left to the event loop."""
        from ..kernels.threads import default_threads

        return self.threads or max(1, (default_threads() - 1) // self.workers)

    @property
    def token(self) -> str | None:
        """What the clients' token file holds; ValueError if it cannot be read or is empty."""
        return read_token(self.token_file, name="token_file") if self.token_file else None

    @property
    def admin_token(self) -> str | None:
        """The operators'; ValueError also if it is the clients'."""
        found = read_token(self.admin_token_file, name="admin_token_file") if self.admin_token_file else None
        if found is not None and found == self.token:
            raise ValueError("admin_token_file holds the token of clients, who may change nothing; make another")
        return found
