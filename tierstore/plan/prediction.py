"""What the planner says of one setup: hit rates, loads, times, wear, power and money."""

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from .host import Host
from .json_file import plain
from .workload import Workload

__all__ = ["NOT_MODELLED", "Latency", "Prediction", "Price", "ResourceLoad", "Setup", "TierLoad", "TierName"]

TierName = Literal["hbm", "ddr", "ssd", "remote"]

NOT_MODELLED: Final = (
    "rows written for the first time (they are computed, not read)",
    "commits, evaluation and checkpoints between steps",
    "reading and parsing the training data",
    "other processes on the hosts, and memory that they take",
    "stalls of single drives (garbage collection, throttling by heat)",
    "faults: hosts or drives that fail, and spares for them",
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a plan chooses.

    Attributes:
        ddr_bytes, hbm_bytes: budgets for rows, of one host and of one accelerator, as ``tierstore.open`` takes them.
        page_cache_bytes: of a host's memory, what the system has left for pages of the stores' files.
        hosts: each holds an equal part of the rows; 1: no network.
        rows_per_read: useful rows a page read brings in; 1 unless a store is packed (``tierstore compact --trace``).
        workers: of serving: processes of a host, each with its part of ``ddr_bytes`` and an executor of its own.
        replicas: of serving: groups of ``hosts`` hosts, each with all rows, that share the queries.
        batch_samples_max: of serving: most samples of a batch of several queries (``--max-batch-samples``).
    """

    workload: Workload
    host: Host
    ddr_bytes: float
    hbm_bytes: float = 0.0
    page_cache_bytes: float = 0.0
    hosts: int = 1
    policy: str = "lru"
    prefetch_depth: int = 2
    threads: int = 1
    rows_per_read: float = 1.0
    workers: int = 1
    replicas: int = 1
    batch_samples_max: int = 4096

    @property
    def num_hosts(self) -> int:
        """Of all replicas."""
        return self.hosts * self.replicas


class TierLoad(NamedTuple):
    """One tier of one host, in one step or query; of all of its accelerators, workers or drives together.

    Attributes:
        rows: capacity, in rows.
        lookups: rows asked of the tier, each once a batch.
        hit_rate: the share of them that it had; of the ssd, the share whose page the system had in memory.
    """

    tier: TierName
    capacity_bytes: float
    rows: float
    lookups: float
    hit_rate: float


class ResourceLoad(NamedTuple):
    """What one step takes of something that can be the bottleneck.

    Attributes:
        resource: "model", "lookups", "cold rows", "ssd reads", "ssd writes", "pcie", "network", ...
        seconds: for which the step keeps it busy, were all else infinitely fast.
        amount, unit: of work, as 12,000 "reads" or 3e6 "bytes".
    """

    resource: str
    seconds: float
    amount: float
    unit: str


class Latency(NamedTuple):
    """Of queries at a rate, waiting included, in seconds; infinite where they come faster than they are answered."""

    queries_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float


class Price(NamedTuple):
    """Of all hosts."""

    watts: float
    usd: float
    """To buy."""
    usd_a_month: float
    """Bought over the years of its life, and power."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a setup.

    Attributes:
        step_s: seconds of a training step, or of a query served alone.
        samples_per_s: of all hosts.
        bottleneck: the resource without which a step would be fastest.
        latency: None for training.
        drive_writes_a_day: of the most worn drive; its rating is in the setup's host.
    """

    setup: Setup
    step_s: float
    samples_per_s: float
    tiers: tuple[TierLoad, ...]
    loads: tuple[ResourceLoad, ...]
    bottleneck: str
    drive_writes_a_day: float
    price: Price
    latency: Latency | None = None
    not_modelled: tuple[str, ...] = NOT_MODELLED

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = plain(self)
        return found
