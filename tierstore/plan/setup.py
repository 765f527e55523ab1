"""A setup: what a plan chooses for a workload on hosts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from ..cache.ddr import POLICIES
from ..settings.sections import Checked, option
from ..system.checks import require_choice
from ..system.sizes import format_size
from .host import Accelerator, Host
from .workload import Workload

if TYPE_CHECKING:
    from ..dist.placement import RankCosts

_MOST: Final = 1e18
_DIVIDED: Final = (
    "ddr_bytes", "page_cache_bytes", "host.processor.flops", "host.ddr.capacity_bytes", "host.ddr.bytes_per_s",
    "host.ddr.row_bytes_per_s", "host.storage.capacity_bytes", "host.storage.reads_per_s",
    "host.storage.read_bytes_per_s", "host.storage.write_bytes_per_s",
)  # fmt: skip
"""Between ranks that share a host."""


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
    hosts: int = option(1, "of training: each holds an equal part of the rows; 1: no network", low=1)
    policy: str = "lru"
    threads: int = option(1, "of the store", low=1)
    cleaning: float = option(1.0, "of a store's cleaning after long training; a new store does less, or none", low=0)
    replicas: int = option(1, "of serving: hosts, each with all rows, that share the queries", low=1)
    rank_costs: "RankCosts | None" = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.policy, POLICIES, "policy")
        if self.workload.is_training and (self.workers > 1 or self.replicas > 1):
            raise ValueError("workers and replicas are for serving; training has hosts")
        if not self.workload.is_training and self.hosts > 1:
            raise ValueError("hosts are for training; serving has replicas, as each host that serves has all tables")

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


def times(value: Any, factor: float, *paths: str) -> Any:
    """With some numbers multiplied; "ddr.usd" is a field of a field, of several parts that of each."""
    for path in paths:
        name, _, rest = path.partition(".")
        part = getattr(value, name)
        if isinstance(part, tuple):
            changed: Any = tuple(times(each, factor, rest) for each in part)
        else:
            changed = times(part, factor, rest) if rest else part * factor
        value = replace(value, **{name: changed})
    return value


def with_memory(host: Host, memory_bytes: float) -> Host:
    """With so much memory, whose watts and price follow."""
    share = memory_bytes / host.ddr.capacity_bytes if host.ddr.capacity_bytes else 0.0
    found: Host = times(host, share, "ddr.watts", "ddr.usd")
    return replace(found, ddr=replace(found.ddr, capacity_bytes=memory_bytes))


def with_accelerators(host: Host, accelerators: tuple[Accelerator, ...]) -> Host:
    """With these; its name says so where they are fewer than before."""
    most, left = len(host.accelerators), len(accelerators)
    name = host.name
    if left < most:
        name += f" with {left} of {most} GPUs" if left else f" without {'its GPU' if most == 1 else 'GPUs'}"
    return replace(host, name=name, accelerators=accelerators)


def some(number: int, noun: str) -> str:
    """1 SSD, 2 SSDs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
