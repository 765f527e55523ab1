"""A host: what its parts can do, take and cost, and what tierstore's own work takes on it; hosts from files, and what
they cost a month. A setup: what a plan chooses for a workload on hosts.

The hosts that ship are in ``hosts.toml``, with the documents that their figures come from.
"""

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ..cache.ddr import POLICIES
from ..layout import RowLayout
from ..settings.sections import Checked, converted, nearest, option, read_toml
from ..system.checks import excerpt, require_choice
from ..system.files import require_new, write_text
from ..system.sizes import format_count, format_size
from .workload import DenseWork, Workload

if TYPE_CHECKING:
    from ..dist.placement import RankCosts

_T = TypeVar("_T")
_MOST: Final = 1e18
MAX_HOSTS: Final = 1 << 16
_SECONDS_A_DAY: Final = 86_400.0
_HOURS_A_MONTH: Final = 24 * 365.25 / 12
_WARRANTY_YEARS: Final = 5.0  # of drives: those over which their writes a day are rated
_DIVIDED: Final = (
    "ddr_bytes", "page_cache_bytes", "host.processor.flops", "host.ddr.capacity_bytes", "host.ddr.bytes_per_s",
    "host.ddr.row_bytes_per_s", "host.storage.capacity_bytes", "host.storage.reads_per_s",
    "host.storage.read_bytes_per_s", "host.storage.write_bytes_per_s",
)  # fmt: skip
"""Between ranks that share a host."""
ID_BYTES: Final = 8
TRAINING_FLOPS: Final = 3
"""Of forward and backward, for each of forward: a layer's gradient has two products of the size of its own. Other
work of a dense model is counted so too."""
AHEAD_BATCHES, HANDED_OVER_BATCHES = 7, 5
"""Times ``batch_us``: fetching a batch ahead, and taking it over; 5.6 to 7 and 4 to 6 in measured runs."""
REQUEST_BATCHES, SERVED_BATCHES = 4, 7
"""Times ``batch_us``: a query's own request over REST, in binary, and a batch of queries that a model answers; of a
DLRM of 26 tables on a server under load."""
PROCESS_BYTES, PARENT_BYTES, LIBRARY_BYTES = 250 << 20, 180 << 20, 500 << 20
"""Memory of a process that trains or serves, without its rows, their map and the dense weights; of the parent of
several workers; and of the libraries' files, which all of them share."""


@dataclass(frozen=True, kw_only=True)
class Memory(Checked):
    """Memory of one kind, all of a host's (DDR) or of one accelerator (HBM)."""

    part: str = ""  # here and below: what it is
    capacity_bytes: float = option(1.0, "bytes", low=1, high=_MOST)
    bytes_per_s: float = option(1.0, "read in order, by all cores", low=1, high=_MOST)
    row_bytes_per_s: float = option(1.0, "read by rows of 256 bytes at random, by all cores", low=1, high=_MOST)
    watts: float = option(0.0, "in use", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Storage(Checked):
    """One SSD."""

    part: str = ""
    capacity_bytes: float = option(1.0, "bytes", low=1, high=_MOST)
    read_latency_us: float = option(100.0, "of one read of 4 KiB with no other under way", low=0)
    reads_per_s: float = option(1.0, "of 4 KiB at random, many under way", low=1)
    read_bytes_per_s: float = option(1.0, "of large reads", low=1, high=_MOST)
    write_bytes_per_s: float = option(1.0, "of segments, 64 KiB or more, lasting", low=1, high=_MOST)
    drive_writes_a_day: float = option(1.0, "of its capacity, over the years of its warranty", low=1e-6)
    watts: float = option(0.0, "reading at random", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Link(Checked):
    """A way for bytes, one direction: PCIe to an accelerator, or a network."""

    part: str = ""
    bytes_per_s: float = option(1.0, "one direction", low=1, high=_MOST)
    latency_us: float = option(0.0, "of a transfer of nothing, there", low=0)


@dataclass(frozen=True, kw_only=True)
class Processor(Checked):
    """All cores of a host."""

    part: str = ""
    cores: int = option(1, "that threads may use", low=1, high=1 << 16)
    flops: float = option(1e9, "of float32 matrix products, by all cores, lasting", low=1, high=_MOST)
    watts: float = option(0.0, "under load", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class Accelerator(Checked):
    """One GPU."""

    part: str = ""
    hbm: Memory
    pcie: Link
    flops: float = option(1e9, "of matrix products in the precision of training, lasting", low=1, high=_MOST)
    watts: float = option(0.0, "under load, its memory's included", low=0)
    usd: float = option(0.0, "price", low=0)


@dataclass(frozen=True, kw_only=True)
class SoftwareCosts(Checked):
    """What tierstore's own work takes on one core of the host, beyond what the parts are limited to;
    docs/planning/model.md says how a step adds it up."""

    batch_us: float = option(
        0.0, "a lookup of a batch, whatever its ids; steps, queries and requests take several times this", low=0
    )
    id_ns: float = option(0.0, "an id, and again a distinct row: found in a cache, or updated", low=0)
    byte_ns: float = option(0.0, "a byte of a row or a bag in memory", low=0)
    miss_ns: float = option(0.0, "a row fetched from a page that the system has in memory", low=0)
    read_ns: float = option(0.0, "a page read from the device, without the device's own time", low=0)
    append_ns: float = option(0.0, "a row appended to the log and synced", low=0)
    append_ns_per_byte: float = option(0.0, "a byte of such a row", low=0)
    transaction_us: float = option(0.0, "a transaction in which rows are appended, however many", low=0)
    wake_us: float = option(
        0.0, "sharing a matrix product between threads, and starting it; a pool's lookups take 1.7 of it", low=0
    )
    value_ns: float = option(0.0, "a value that a dense model reads or writes, on one core", low=0)

    def lookup_ns(self, *, ids: float, rows: float, bags: float, layout: RowLayout) -> float:
        """Pooling rows that are in memory; ``rows``: distinct ones."""
        return self.byte_ns * (ID_BYTES * ids + layout.weight_bytes * (rows + bags))

    def update_ns(self, *, ids: float, rows: float, bags: float, layout: RowLayout) -> float:
        """Backward and optimizer of the same: gradients of bags, and rows with their state, read and written."""
        moved = 2 * (layout.row_bytes * rows + layout.weight_bytes * bags)
        return self.admission_ns(ids=ids, rows=rows) + self.byte_ns * moved

    def admission_ns(self, *, ids: float, rows: float) -> float:
        """Finding them in a cache in which not all rows fit."""
        return self.id_ns * (ids + rows)

    def miss_row_ns(self, layout: RowLayout) -> float:
        """A row fetched from the page cache."""
        return self.miss_ns + self.byte_ns * layout.row_bytes

    def append_row_ns(self, layout: RowLayout) -> float:
        """A row appended."""
        return self.append_ns + self.append_ns_per_byte * layout.row_bytes

    def dense_ns(self, dense: DenseWork, *, samples: float, threads: int, is_training: bool) -> tuple[float, float]:
        """A dense model's step or query beyond its flops: of starting its products, and of its values over all
        threads."""
        times = TRAINING_FLOPS if is_training else 1
        starts = 1e3 * times * dense.dense_products * self.wake_us if threads > 1 else 0.0
        return starts, times * samples / threads * dense.dense_values * self.value_ns


@dataclass(frozen=True, kw_only=True)
class Host(Checked):
    """One machine; ``source``: where its figures come from."""

    name: str
    processor: Processor
    ddr: Memory
    network: Link
    costs: SoftwareCosts
    storage: tuple[Storage, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    watts: float = option(0.0, "of what is not listed: board, fans, losses of the power supply", low=0)
    usd: float = option(0.0, "price of what is not listed", low=0)
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Pricing(Checked):
    """Assumptions of money and time."""

    years: float = option(4.0, "years in which hosts are used, and over which they are paid", low=0.01, high=100)
    usd_per_kwh: float = option(0.12, "dollars a kilowatt-hour", low=0)
    pue: float = option(1.3, "watts of the building for each watt of a host", low=1)


class Price(NamedTuple):
    """Of all hosts: ``usd`` to buy them; a month over the years of their life, with power."""

    watts: float
    usd: float
    usd_a_month: float


def price_of(host: Host, count: int, pricing: Pricing) -> Price:
    """Of so many hosts: what they draw, what they cost, and both a month. An accelerator's include its memory's.

    ``usd / months + watts / 1000 * PUE * hours a month * usd per kWh``.
    """
    parts: tuple[Any, ...] = (host, host.processor, host.ddr, *host.storage, *host.accelerators)
    watts, usd = count * sum(part.watts for part in parts), count * sum(part.usd for part in parts)
    power = watts / 1000 * pricing.pue * _HOURS_A_MONTH * pricing.usd_per_kwh
    return Price(watts, usd, usd / (12 * pricing.years) + power)


class Wear(NamedTuple):
    """Of the drive that wears out first: how often it is written a day, and may be; years until its rating is used up,
    infinite if nothing is written."""

    writes_a_day: float
    rated: float
    years: float


def wear_of(host: Host, bytes_per_s: float) -> Wear:
    """Drives share what is written as they are fast."""
    worn, speed = list[Wear](), sum(drive.write_bytes_per_s for drive in host.storage)
    for drive in host.storage if bytes_per_s else ():
        writes = bytes_per_s * drive.write_bytes_per_s / speed * _SECONDS_A_DAY / drive.capacity_bytes
        worn.append(Wear(writes, drive.drive_writes_a_day, _WARRANTY_YEARS * drive.drive_writes_a_day / writes))
    return min(worn, key=lambda each: each.years, default=Wear(0.0, 0.0, math.inf))


@functools.cache
def example_hosts() -> Mapping[str, Host]:
    """The hosts that ship, by name. Their prices are assumptions."""
    tables = read_toml(Path(__file__).with_name("hosts.toml"), "file of hosts")
    costs = tables.pop("costs")
    return {name: converted({**own, "name": name, "costs": costs}, Host, name) for name, own in tables.items()}


def describe_hosts() -> str:
    """The hosts that ship, for people."""
    lines = []
    for name, host in example_hosts().items():
        price = price_of(host, 1, Pricing())
        lines.append(f"{name:16} {host.source.removeprefix('an example: ')}")
        lines += [f"{'':16} ${price.usd:,.0f}, {price.watts:,.0f} W", ""]
    return "\n".join(lines) + "All prices are assumptions: put yours in a file of your own."


def load_host(source: str | os.PathLike[str]) -> Host:
    """A host that ships, by its name, or that of a file: what has a slash in it or ends in .json. The file has every
    figure of a ``Host`` under its field's name, as ``tierstore plan measure`` writes it.

    ValueError: there is none, it is not JSON, or a key is unknown, missing or out of range; names file and key.
    """
    name = os.fspath(source)
    if isinstance(source, str) and os.sep not in name and Path(name).suffix not in (".json", ".toml"):
        if name not in example_hosts():
            raise ValueError(f"there is no host named {excerpt(name)}; {nearest(name, example_hosts())}")
        return example_hosts()[name]
    try:
        if Path(name).suffix != ".json":
            raise ValueError("a host's file is JSON, as tierstore plan hosts NAME > mine.json gives one to begin with")
        document = json.loads(Path(name).read_text(encoding="utf-8"))
        found: Host = converted(document, Host, "a host", is_whole=True)  # a figure left out would be 0
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix("a host: ").removeprefix("a host.")
        begin = "is not valid JSON: " if isinstance(error, UnicodeError | json.JSONDecodeError | RecursionError) else ""
        hint = "; a host's file has all that tierstore plan measure writes: run it again" if "key " in reason else ""
        raise ValueError(f"{name}: {begin}{reason}{hint}") from None
    return found


def host_text(host: Host) -> str:
    """All figures of a host as JSON."""
    return json.dumps(asdict(host), indent=2, allow_nan=False)


def write_host(host: Host, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write all figures of a host as JSON, whole or not at all. ValueError: the name does not end in .json.
    FileExistsError: there is such a file, and ``force`` is not given."""
    require_writable(Path(path), force=force)
    write_text(Path(path), host_text(host) + "\n", force=force)


def require_writable(path: Path, *, force: bool) -> None:
    """Raise what ``write_host`` would, before there is anything to write."""
    if path.suffix != ".json":
        raise ValueError(f"{path}: the name of a host's file that is written ends in .json")
    require_new(path, force=force)


@dataclass(frozen=True, kw_only=True)
class Choices(Checked):
    """Of a setup, as a plan file gives them."""

    prefetch_depth: int = option(2, "batches whose rows are fetched ahead; 0: none", low=0, high=1024)
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
    hosts: int = option(1, "in training each holds an equal part of the rows, in serving all of them", low=1)
    policy: str = "lru"
    threads: int = option(1, "of a process", low=1)
    cleaning: float = option(1.0, "of a store's cleaning after long training; a new store does less, or none", low=0)
    rank_costs: "RankCosts | None" = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.policy, POLICIES, "policy")
        if self.workload.is_training and self.workers > 1:
            raise ValueError(f"workers={self.workers}: they are of serving; leave it out to train")

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
        own = times(replace(self, host=host), 1 / ranks, *_DIVIDED)
        return replace(own, hosts=self.hosts * ranks, threads=1)  # lookups were measured as they are

    @property
    def gpu(self) -> Accelerator:
        """The one that has rows: a store uses one."""
        return self.host.accelerators[0]

    @property
    def parts(self) -> int:
        """Hosts, or ranks, over which the rows and the batch are divided."""
        return self.hosts if self.workload.is_training else 1


def default_threads(host: Host, workers: int, *, is_training: bool) -> int:
    """Of a process that trains, or of each worker that serves, as they take them."""
    cores = host.processor.cores
    return cores if is_training else max(1, (cores - 1) // workers)


def times(value: _T, factor: float, *paths: str) -> _T:
    """With some numbers multiplied; "ddr.usd" is a field of a field, of several parts that of each."""
    for path in paths:
        name, _, rest = path.partition(".")
        part: Any = getattr(value, name)
        if isinstance(part, tuple):
            changed: Any = tuple(times(each, factor, rest) for each in part)
        else:
            changed = times(part, factor, rest) if rest else part * factor
        value = replace(value, **{name: changed})  # type: ignore[type-var]
    return value


def with_parts(host: Host, *, memory_share: float, drives: int, gpus: int) -> Host:
    """With so much of its memory, whose watts and price follow, and so many of its drives and GPUs; its name says so
    where GPUs are fewer."""
    most = len(host.accelerators)
    return replace(
        times(host, memory_share, "ddr.capacity_bytes", "ddr.watts", "ddr.usd"),
        name=f"{host.name} with {gpus} of {most} GPUs" if gpus < most else host.name,
        storage=host.storage[:drives],
        accelerators=host.accelerators[:gpus],
    )


def describe_setup(setup: Setup) -> str:
    """Its machines and budgets, in one line."""
    host = setup.host
    of_it = [f"{format_size(setup.ddr_bytes)} of it for {setup.workload.dtype} rows"]
    of_it += [f"{format_size(setup.page_cache_bytes)} page cache"] if setup.page_cache_bytes else []
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR, {', '.join(of_it)}"]
    parts += [f"1 GPU, {format_size(setup.hbm_bytes)} of its HBM for rows"] if setup.hbm_bytes else []
    parts += [format_count(len(host.storage), "SSD")] if host.storage else []
    parts += [f"{setup.workers} workers"] if setup.workers > 1 else []
    return f"{setup.hosts:,} x {host.name} ({'; '.join(parts)})"
