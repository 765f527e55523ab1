"""The plan file: one TOML file says what is to be planned. The help of a section's field is what ``--keys`` shows."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..settings import sections
from ..settings.sections import Checked, ConfigError, Override, option
from ..system.checks import excerpt
from ..system.sizes import format_size, parse_size
from .host import Choices, Host, Pricing, Setup, example_hosts, load_host, with_accelerators, with_memory
from .presets import PRESETS, load_workload, preset, scaled
from .search import SearchSpace, Target
from .workload import TableSpec, Workload, specified

_MAX_SCALE, _MAX_HOSTS, _MAX_PARTS = 1e6, 1 << 16, 1 << 10


def _require_size(section: str, key: str, value: int | str) -> None:
    if value == "":
        return
    try:
        parse_size(value, name=key, memory_bytes=0)
    except ValueError:
        raise ConfigError(
            f'{section}.{key} = {excerpt(value)}: expected a size, as "512MiB", "64GiB", "50%" of what the host has or '
            '"5% of tables"'
        ) from None


@dataclass(frozen=True, kw_only=True)
class WorkloadSection(Checked):
    """[workload]: the model in use: a preset, a file, or tables written here."""

    preset: str = option("", "one of tierstore plan presets")
    file: str = option("", "a workload in TOML, as tierstore plan presets NAME prints one, or a run file")
    tables: tuple[TableSpec, ...] = option((), "tables, each as [[workload.tables]] with name, num_embeddings, ...")
    name: str = option("", "what the report calls it")
    scale: float = option(1.0, "of the rows of every table: 0.01 plans for a hundredth of them", low=0, high=_MAX_SCALE)
    batch_samples: int = option(0, "samples of a training step, or of a query; 0: the workload's own", low=0)
    optimizer: str = option("", 'of training: "sgd", "rowwise_adagrad", "adagrad", "adam"; "none": lookups only')
    dtype: str = option("", 'of the rows: "float32", "float16", "bfloat16", "int8" or "int4"')
    dense_flops: float = option(
        0.0,
        "of the model beside its tables, forward, a sample; 0: the workload's own, or as of MLPerf's DLRM-DCNv2 over "
        "these tables; 1: tables alone",
        low=0,
        high=1e15,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in ("preset", "file", "tables") if getattr(self, key)]
        if len(given) > 1:
            raise ConfigError(f"workload.{given[1]} = {excerpt(getattr(self, given[1]))}: {given[0]} is given too")


@dataclass(frozen=True, kw_only=True)
class TraceSection(Checked):
    """[trace]: which rows are asked for. Without one the tables' exponents say it."""

    path: str = option("", "a trace, of tierstore trace or a recording")


@dataclass(frozen=True, kw_only=True)
class HostSection(Checked):
    """[host]: the machine."""

    name: str = option("", "one of tierstore plan hosts")
    file: str = option("", "a host in TOML or JSON, as tierstore plan measure writes one")
    ssds: int = option(-1, "drives of the host's kind; -1: as many as it has", low=-1, high=_MAX_PARTS)
    accelerators: int = option(-1, "GPUs of the host's kind; -1: as many as it has", low=-1, high=_MAX_PARTS)
    memory: int | str = option("", 'its DDR, as "512GiB"; "": what it has')
    others: tuple[str, ...] = option((), "names or files of hosts that the search compares with it")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_size("host", "memory", self.memory)
        if self.name and self.file:
            raise ConfigError(f"host.file = {excerpt(self.file)}: a name is given too")


@dataclass(frozen=True, kw_only=True)
class SetupSection(Choices):
    """[setup]: what is decided already. With ddr it is predicted as it is; without, the search finds the rest."""

    ddr: int | str = option("", 'memory for rows, of a host: "64GiB", "50%" of its memory, "5% of tables"; "": search')
    hbm: int | str = option(
        "", 'memory for rows, of the GPU that trains; written as ddr is; "": none, or what the search finds'
    )
    page_cache: int | str = option(0, "memory that the system has left for pages of the stores' files")
    hosts: int = option(
        0,
        "in training each holds an equal part of the rows, in serving all; 0: one, or what the search finds",
        low=0,
        high=_MAX_HOSTS,
    )
    policy: Literal["auto", "lru", "lfu", "tinylfu"] = option(
        "auto", "which rows leave memory first: auto, lru, lfu or tinylfu"
    )
    threads: int = option(0, "of the store; 0: the host's cores", low=0, high=1 << 16)
    rank_costs: str = option(
        "", 'of training: file of tierstore shard measure, if ranks share a host; "": each has a host of its own'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("ddr", "hbm", "page_cache"):
            _require_size("setup", key, getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class TargetSection(Target):
    """[target]: what the setup must reach. 0: not asked for."""

    query_sizes: str = option("", 'file with samples of queries, each as likely, as 100, 200; "": all alike')


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A whole plan's input. ``load`` reads it from TOML."""

    workload: WorkloadSection = field(default_factory=WorkloadSection)
    trace: TraceSection = field(default_factory=TraceSection)
    host: HostSection = field(default_factory=HostSection)
    setup: SetupSection = field(default_factory=SetupSection)
    target: TargetSection = field(default_factory=TargetSection)
    pricing: Pricing = field(default_factory=Pricing)
    search: SearchSpace = field(default_factory=SearchSpace)

    @property
    def is_fixed(self) -> bool:
        """Whether the setup is given, rather than to be found."""
        return self.setup.ddr != ""


parse_override = functools.partial(sections.parse_override, example="setup.ddr=64GiB")


def load(path: str | Path, overrides: Iterable[Override] = ()) -> PlanFile:
    """As of ``sections.load_sections``."""
    return sections.load_sections(PlanFile, path, overrides, what="plan file")


def workload_of(asked: PlanFile) -> Workload:
    """ValueError: it names none, or one that there is not, or a value that cannot be."""
    section = asked.workload
    if not (section.preset or section.file or section.tables):
        raise ConfigError(
            f"workload.preset = '': give one of {', '.join(PRESETS)}; or workload.file, or [[workload.tables]]"
        )
    if section.tables:
        found = specified(section.tables, name=section.name or "workload")
    else:
        found = preset(section.preset) if section.preset else load_workload(Path(section.file))
    found = scaled(found, section.scale) if section.scale != 1 else found
    keys = ("name", "batch_samples", "optimizer", "dtype", "dense_flops")
    given = {name: getattr(section, name) for name in keys if getattr(section, name)}
    if section.dense_flops:  # the layers are not those of the file then
        found = replace(found, dense_products=0.0, dense_values=0.0)
        given["assumed"] = tuple(each for each in found.assumed if each.figure != "dense_flops")
    try:
        return replace(found, **given)
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None


def hosts_of(asked: PlanFile) -> tuple[Host, ...]:
    """The host, with the counts of the section, and those that the search compares it with. ValueError: there is none,
    or none of a part that is counted."""
    section = asked.host
    if not section.name and not section.file:
        raise ConfigError(f"host.name = '': give one of {', '.join(example_hosts())}; or host.file")
    own = load_host(section.name) if section.name else load_host(Path(section.file))
    for key, parts in (("ssds", own.storage), ("accelerators", own.accelerators)):
        if getattr(section, key) > 0 and not parts:
            raise ConfigError(
                f"host.{key} = {getattr(section, key)}: host {excerpt(own.name)} has none to have more of"
            )
    if section.ssds >= 0:
        own = replace(own, storage=own.storage[:1] * section.ssds)
    if section.accelerators >= 0:
        own = with_accelerators(own, own.accelerators[:1] * section.accelerators)
    if section.memory != "":
        size_bytes = parse_size(section.memory, name="memory", memory_bytes=int(own.ddr.capacity_bytes))
        if not size_bytes or not own.ddr.capacity_bytes:
            raise ConfigError(
                f"host.memory = {excerpt(section.memory)} is {format_size(size_bytes)}, host {excerpt(own.name)} has "
                f'{format_size(int(own.ddr.capacity_bytes))}: expected a size, as "512GiB", or "50%" of what it has'
            )
        own = with_memory(own, size_bytes)
    return own, *map(load_host, section.others)


def setup_of(asked: PlanFile, workload: Workload, host: Host) -> Setup:
    """What the file leaves open is the least: one host, no memory of GPUs. ValueError: a size cannot be read."""
    from ..dist.placement import RankCosts

    section, memory = asked.setup, int(host.ddr.capacity_bytes)
    hbm = int(min((gpu.hbm.capacity_bytes for gpu in host.accelerators), default=0))

    def size(key: str, of_bytes: int) -> int:
        given = getattr(section, key) or 0
        return parse_size(given, name=f"setup.{key}", table_bytes=workload.table_bytes, memory_bytes=of_bytes)

    counts: dict[str, Any] = {"hosts" if workload.is_training else "replicas": max(1, section.hosts)}
    return Setup(
        workload=workload,
        host=host,
        ddr_bytes=size("ddr", memory),
        hbm_bytes=size("hbm", hbm),
        page_cache_bytes=size("page_cache", memory),
        policy=section.policy,
        threads=section.threads or host.processor.cores,
        rank_costs=RankCosts.load(section.rank_costs) if section.rank_costs else None,
        **counts | {each.name: getattr(section, each.name) for each in fields(Choices)},
    )


def query_sizes_of(asked: PlanFile) -> tuple[float, ...] | None:
    """Samples of queries, each as likely; None where the file names none. ValueError: the file cannot be read, or has
    something else in it than numbers above 0, with commas or space between them."""
    path = asked.target.query_sizes
    if not path:
        return None
    try:
        sizes = tuple(map(float, Path(path).read_text(encoding="utf-8").replace(",", " ").split()))
        if not sizes or not all(math.isfinite(size) and size > 0 for size in sizes):
            raise ValueError("expected numbers of samples, at least one, each more than 0")
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.query_sizes = {excerpt(path)}: {error}") from None
    return sizes
