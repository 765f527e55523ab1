"""What the planner says of one setup: hit rates, loads, times, wear, power and money."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ..cache import POLICIES
from ..dist.ranks import Precision
from ..settings.sections import option
from ..system.checks import require_choice
from ..system.sizes import format_size
from .host import Accelerator, Checked, Host, shared_by, times
from .queueing import Latency, Queue
from .workload import Workload

if TYPE_CHECKING:
    from ..dist.placement import RankCosts

_MOST: Final = 1e18
FLOAT_BYTES: Final = 4
TierName = Literal["hbm", "ddr", "ssd"]

_IN_WORDS: Final = {
    "batch": "fixed work of a batch",
    "lookups": "work on cached rows",
    "hbm": "HBM bandwidth",
    "model": "dense model",
    "cold rows": "bringing rows in",
    "id exchange": "exchanging ids",
    "write-back": "writing rows back",
    "wait for a core": "waiting for a core",
    "wait ahead": "waiting for a core",
    "ddr": "DDR bandwidth",
    "ssd reads": "SSD reads",
    "ssd writes": "SSD writes",
    "pcie": "PCIe",
    "computing": "computing the batch",
    "in turn": "everything in turn",
    "fetching": "fetching later batches",
    "drives": "SSDs",
}

NOT_MODELLED: Final = (
    "rows written for the first time (they are computed, not read)",
    "commits, evaluation and checkpoints between steps",
    "reading and parsing the training data",
    "other processes on the hosts, and memory that they take",
    "stalls of single drives (garbage collection, throttling by heat)",
    "faults: hosts or drives that fail, and spares for them",
)


def in_words(name: str) -> str:
    """A load's or lane's name as people read it: "wait ahead" -> "waiting for a core"."""
    return _IN_WORDS.get(name, name)


def rate(value: float) -> str:
    """Things a second: 33,740, or 4.25 where there are few."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def some(number: int, noun: str) -> str:
    """1 SSD, 2 SSDs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Setup(Checked):
    """What a plan chooses."""

    workload: Workload
    host: Host
    ddr_bytes: float = option(0.0, "budget for rows, of one host, as ``tierstore.open`` takes it", low=0, high=_MOST)
    hbm_bytes: float = option(0.0, "the same, of the host's one GPU; of training on one host", low=0, high=_MOST)
    page_cache_bytes: float = option(0.0, "of a host's memory: left for pages of the stores' files", low=0, high=_MOST)
    hosts: int = option(1, "each holds an equal part of the rows; 1: no network", low=1)
    policy: str = "lru"
    prefetch_depth: int = option(2, "batches whose rows are fetched ahead", low=0)
    threads: int = option(1, "of the store", low=1)
    cleaning: float = option(1.0, "of a store's cleaning after long training; a new store does less, or none", low=0)
    rows_per_read: float = option(1.0, "useful rows that a page brings in: more for a packed store", low=1)
    workers: int = option(1, "of serving: processes of a host, each with its part of ddr_bytes", low=1)
    replicas: int = option(1, "of serving: groups of hosts, each with all rows, that share the queries", low=1)
    batch_samples_max: int = option(4096, "of serving: most samples of a batch of several queries", low=1)
    wire: Precision = "fp32"
    """Of rows and gradients between hosts."""
    rank_costs: "RankCosts | None" = None
    """Of training: ranks share a host as these were measured to; ``hosts`` have as many as ``world_size``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.policy, POLICIES, "policy")
        if self.workload.is_training and (self.workers > 1 or self.replicas > 1):
            raise ValueError("workers and replicas are for serving; training has hosts")

    @property
    def of_a_rank(self) -> "Setup":
        """Each rank as a host of its own, with its share of the host's parts; without ``rank_costs`` itself.
        ValueError: they are of other ranks, or it serves."""
        costs = self.rank_costs
        if costs is None:
            return self
        if not self.workload.is_training:
            raise ValueError("rank_costs are of training, and the workload's optimizer is none")
        ranks = costs.local_world_size
        if costs.world_size != self.hosts * ranks:
            raise ValueError(
                f"rank_costs are of {costs.world_size} ranks, {ranks} on a host, and hosts is {self.hosts}; measure "
                "them again with tierstore shard measure"
            )
        own: Setup = times(self, 1 / ranks, "ddr_bytes", "page_cache_bytes")
        threads = 1  # of lookups, which were measured as they are
        return replace(own, host=shared_by(self.host, ranks), hosts=self.hosts * ranks, threads=threads)

    @property
    def gpu(self) -> Accelerator:
        """The one that has rows: a store uses one."""
        return self.host.accelerators[0]

    @property
    def num_hosts(self) -> int:
        """Of all replicas."""
        return self.hosts * self.replicas


def machines_of(setup: Setup) -> str:
    host = setup.host
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR", some(len(host.storage), "SSD")]
    parts += ["1 GPU"] if setup.hbm_bytes else []
    return f"{setup.num_hosts} x {host.name} ({', '.join(parts)})"


def describe_setup(setup: Setup) -> str:
    """Its machines and budgets, in one line."""
    host = setup.host
    of_it = [f"{format_size(setup.ddr_bytes)} of it for {setup.workload.dtype} rows"]
    of_it += [f"{format_size(setup.page_cache_bytes)} page cache"] if setup.page_cache_bytes else []
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR, {', '.join(of_it)}"]
    parts += [f"1 GPU, {format_size(setup.hbm_bytes)} of its HBM for rows"] if setup.hbm_bytes else []
    parts += [some(len(host.storage), "SSD")] if host.storage else []
    parts += [f"{setup.workers} workers"] if setup.workers > 1 else []
    return f"{setup.num_hosts:,} x {host.name} ({'; '.join(parts)})"


class TierLoad(NamedTuple):
    """One tier of one host, in one step or query; of all of its workers or drives together.

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


class Lane(NamedTuple):
    """Work that goes on one after another, beside that of other lanes.

    Attributes:
        name: "computing", "fetching", "drives", ...
        seconds: of a step, of all its resources.
        resources: names of loads.
    """

    name: str
    seconds: float
    resources: tuple[str, ...]


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
        lanes: the longest first; a step takes as long as that.
        bottleneck: the resource that takes longest in the longest lane.
        is_in_memory: every row has a place in DDR or HBM, and the drives are not read.
        latency: None for training, and where no rate is asked for.
        queue: of one replica that serves; None for training.
        drive_writes_a_day: of the most worn drive; its rating is in the setup's host.
    """

    setup: Setup
    step_s: float
    samples_per_s: float
    tiers: tuple[TierLoad, ...]
    loads: tuple[ResourceLoad, ...]
    lanes: tuple[Lane, ...]
    bottleneck: str
    drive_writes_a_day: float
    price: Price
    is_in_memory: bool = False
    latency: Latency | None = None
    queue: Queue | None = None
    not_modelled: tuple[str, ...] = NOT_MODELLED
