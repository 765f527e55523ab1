"""A setup, what the planner says of it, and what hosts cost and how fast their drives wear out."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ..cache.ddr import POLICIES
from ..settings.sections import Checked, option
from ..system.checks import require_choice
from ..system.sizes import format_size
from .host import Accelerator, Host, Storage, times
from .queueing import Latency, Queue
from .workload import Workload

if TYPE_CHECKING:
    from ..dist.placement import RankCosts

_MOST: Final = 1e18
_SECONDS_A_DAY: Final = 86_400.0
_DAYS_A_MONTH: Final = 365.25 / 12
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

_DIVIDED: Final = (
    "ddr_bytes", "page_cache_bytes", "host.processor.flops", "host.ddr.capacity_bytes", "host.ddr.bytes_per_s",
    "host.ddr.row_bytes_per_s", "host.storage.capacity_bytes", "host.storage.reads_per_s",
    "host.storage.read_bytes_per_s", "host.storage.write_bytes_per_s",
)  # fmt: skip
"""Between ranks that share a host."""
NOT_MODELLED: Final = (
    "rows written for the first time (they are computed, not read)",
    "commits, evaluation and checkpoints between steps",
    "reading and parsing the training data",
    "other processes on the hosts, and memory that they take",
    "stalls of single drives (garbage collection, throttling by heat)",
    "faults: hosts or drives that fail, and spares for them",
)


def in_words(name: str) -> str:
    """A load's or lane's name as people read it."""
    return _IN_WORDS.get(name, name)


def rate(value: float) -> str:
    """33,740 a second, or 4.25."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def some(number: int, noun: str) -> str:
    """1 SSD, 2 SSDs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Choices(Checked):
    """Of a setup, as a plan file gives them."""

    prefetch_depth: int = option(2, "batches whose rows are fetched ahead; 0: none", low=0, high=1024)
    rows_per_read: float = option(1.0, "useful rows that a page brings in: more for a packed store", low=1, high=4096)
    wire: Literal["fp32", "fp16", "bf16", "int8"] = option(
        "fp32", "of rows and gradients between hosts: fp32, fp16, bf16 or int8"
    )
    workers: int = option(1, "of serving: processes of a host, each with its part of ddr", low=1, high=1024)
    batch_samples_max: int = option(4096, "of serving: most samples of a batch of several queries", low=1)


@dataclass(frozen=True, kw_only=True)
class Setup(Choices):
    """What a plan chooses. ``rank_costs``: of training, ranks share a host as these were measured to."""

    workload: Workload
    host: Host
    ddr_bytes: float = option(0.0, "budget for rows, of one host, as ``tierstore.open`` takes it", low=0, high=_MOST)
    hbm_bytes: float = option(0.0, "the same, of the host's one GPU; of training on one host", low=0, high=_MOST)
    page_cache_bytes: float = option(0.0, "of a host's memory: left for pages of the stores' files", low=0, high=_MOST)
    hosts: int = option(1, "each holds an equal part of the rows; 1: no network", low=1)
    policy: str = "lru"
    threads: int = option(1, "of the store", low=1)
    cleaning: float = option(1.0, "of a store's cleaning after long training; a new store does less, or none", low=0)
    replicas: int = option(1, "of serving: groups of hosts, each with all rows, that share the queries", low=1)
    rank_costs: "RankCosts | None" = None

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
        cores = max(1, self.host.processor.cores // ranks)
        host = replace(self.host, processor=replace(self.host.processor, cores=cores))
        own: Setup = times(replace(self, host=host), 1 / ranks, *_DIVIDED)
        return replace(own, hosts=self.hosts * ranks, threads=1)  # lookups were measured as they are

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
    """One tier of one host, of all of its workers or drives together. ``lookups``: rows asked of it, each once a batch;
    ``hit_rate``: of the ssd, the share whose page the system had in memory."""

    tier: TierName
    capacity_bytes: float
    rows: float
    lookups: float
    hit_rate: float


class ResourceLoad(NamedTuple):
    """What keeps a resource of ``loads`` busy, were all else infinitely fast; ``amount``: of work, in ``unit``."""

    resource: str
    seconds: float
    amount: float
    unit: str


class Lane(NamedTuple):
    """Work that goes on one after another, alongside that of other lanes; ``resources``: names of loads."""

    name: str
    seconds: float
    resources: tuple[str, ...]


class Price(NamedTuple):
    """Of all hosts: ``usd`` to buy them; a month over the years of their life, with power."""

    watts: float
    usd: float
    usd_a_month: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a setup.

    Attributes:
        step_s: seconds of a training step, or of a query served alone.
        samples_per_s: of all hosts.
        lanes: the longest first; a step takes as long as that.
        is_in_memory: every row has a place in DDR or HBM, and the drives are not read.
        latency: None for training, and where no rate is asked for.
        queue: of one replica that serves; None for training.
        drive_writes_a_day: of the most worn drive.
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


@dataclass(frozen=True, kw_only=True)
class Pricing(Checked):
    """Assumptions of money and time."""

    usd_per_kwh: float = option(0.12, "dollars a kilowatt-hour", low=0)
    pue: float = option(1.3, "watts of the building for each watt of a host (power usage effectiveness)", low=1)
    years: float = option(4.0, "for which hosts are used, and over which their price is spread", low=0.01, high=100)
    hours_a_day: float = option(24.0, "of use", low=0.01, high=24)
    warranty_years: float = option(5.0, "of drives: those over which their writes a day are rated", low=0.01, high=100)


def price_of(host: Host, count: int, pricing: Pricing) -> Price:
    """Of so many hosts: what they draw, what they cost, and both a month. An accelerator's include its memory's.

    ``usd / months + watts / 1000 * PUE * hours a month * usd per kWh``.
    """
    parts: tuple[Any, ...] = (host, host.processor, host.ddr, *host.storage, *host.accelerators)
    watts, usd = count * sum(part.watts for part in parts), count * sum(part.usd for part in parts)
    power = watts / 1000 * pricing.pue * pricing.hours_a_day * _DAYS_A_MONTH * pricing.usd_per_kwh
    return Price(watts, usd, usd / (12 * pricing.years) + power)


def drive_writes_a_day(host: Host, bytes_per_s: float, pricing: Pricing) -> float:
    """Of the drive that wears out first; drives share what is written as they are fast."""
    if not bytes_per_s:
        return 0.0
    speed = sum(drive.write_bytes_per_s for drive in host.storage)
    a_day = bytes_per_s * _SECONDS_A_DAY * pricing.hours_a_day / 24
    return a_day / speed * _wear(first_worn(host))


def years_of_life(prediction: Prediction, pricing: Pricing) -> float:
    """Until the first drive has been written as often as it is rated for; infinite if nothing is written."""
    writes = prediction.drive_writes_a_day
    if not writes:
        return math.inf
    return pricing.warranty_years * first_worn(prediction.setup.host).drive_writes_a_day / writes


def first_worn(host: Host) -> Storage:
    """The drive that is soonest written as often as it is rated for."""
    return min(host.storage, key=lambda drive: drive.drive_writes_a_day / _wear(drive))


def _wear(drive: Storage) -> float:
    """How fast it is written over, compared with other drives of its host."""
    return drive.write_bytes_per_s / drive.capacity_bytes
