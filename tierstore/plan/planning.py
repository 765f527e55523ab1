"""``plan``: from a plan file to its answer, and to all that a report shows of it.

One TOML file says what is to be planned. The help of a section's field is what ``--keys`` shows.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ..cache.ddr import resolve_policy
from ..settings import sections
from ..settings.sections import Checked, ConfigError, Override, option
from ..system.checks import excerpt
from ..system.files import write_text
from ..system.sizes import format_size, parse_size
from .curves import MissRatioCurve, curve
from .demand import Demand, pool_loads
from .host import (
    Choices,
    Host,
    Pricing,
    Setup,
    describe_setup,
    example_hosts,
    first_worn,
    load_host,
    years_of_life,
)
from .model import Marginal, Prediction, marginal_values, predict, why_no_gpu
from .search import Attempt, SearchResult, SearchSpace, Target, lacks, search
from .traces import Accesses, read_accesses
from .workload import Workload, WorkloadSection, assumptions, workload_of

_SEARCHED: Final = ("ddr", "hosts", "policy")  # keys of [setup] that a search heeds: hosts as the only count
_FULL: Final = 0.9  # of a memory: more, and the system has little left
_LONG_TRACE: Final = 20  # batches: with fewer, most of what a trace has are first uses
_MAX_HOSTS: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TraceSection(Checked):
    """[trace]: which rows are asked for. Without one the tables' exponents say it."""

    path: str = option("", "a trace, of tierstore trace or a recording")


@dataclass(frozen=True, kw_only=True)
class HostSection(Checked):
    """[host]: the machine."""

    GONE = dict.fromkeys(
        ("ssds", "accelerators", "memory"), "change the counts in a host file: tierstore plan hosts NAME > mine.json"
    )
    name: str = option("", "one of tierstore plan hosts")
    file: str = option("", "a host in JSON, as tierstore plan measure writes one")
    others: tuple[str, ...] = option((), "names or files of hosts that the search compares with it")

    def __post_init__(self) -> None:
        if self.name and self.file:
            raise ConfigError(f"host.file = {excerpt(self.file)}: a name is given too")


@dataclass(frozen=True, kw_only=True)
class SetupSection(Choices):
    """[setup]: what is decided already. With ddr it is predicted as it is; without, the search finds the rest."""

    GONE = dict.fromkeys(("wire", "rows_per_read"), "leave it out: plans are of fp32, and of a row a read")
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
            value = getattr(self, key)
            try:
                parse_size(value or 0, name=key, memory_bytes=0)
            except ValueError:
                raise ConfigError(
                    f'setup.{key} = {excerpt(value)}: expected a size, as "512MiB", "64GiB", "50%" of what the host '
                    'has or "5% of tables"'
                ) from None


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A whole plan's input. ``load`` reads it from TOML."""

    workload: WorkloadSection = field(default_factory=WorkloadSection)
    trace: TraceSection = field(default_factory=TraceSection)
    host: HostSection = field(default_factory=HostSection)
    setup: SetupSection = field(default_factory=SetupSection)
    target: Target = field(default_factory=Target)
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


def hosts_of(asked: PlanFile) -> tuple[Host, ...]:
    """The host, and those that the search compares it with. ValueError: there is none."""
    section = asked.host
    if not section.name and not section.file:
        raise ConfigError(f"host.name = '': give one of {', '.join(example_hosts())}; or host.file")
    return load_host(section.name or Path(section.file)), *map(load_host, section.others)


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


class ShownCurve(NamedTuple):
    """Of tables that share a cache; ``chosen_rows``: of it that the memory of all hosts holds."""

    name: str
    curve: MissRatioCurve
    chosen_rows: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer to a plan file."""

    assumptions: tuple[str, ...] = ()  # what nobody said, each with the value that was taken
    asked: PlanFile
    prediction: Prediction
    hosts: tuple[str, ...]  # names of those that were asked about
    # The cheapest that has every row in DDR or HBM and meets the target, or why there is none; None where the setup is
    # given, or rows are in memory by the file's wish.
    in_memory: Prediction | str | None = None
    curves: tuple[ShownCurve, ...] = ()  # of the pools that the prediction is made of
    marginals: tuple[Marginal, ...] = ()
    alternatives: tuple[Attempt, ...] = ()  # the next best first, then those that fail
    marks: tuple[str, ...] = ()  # clauses that belong to the answer: what wears out
    warnings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is unbounded is None. Setups that were not chosen are a line each."""
        found: dict[str, Any] = plain(self)
        for own, each in zip(found["alternatives"], self.alternatives, strict=True):
            own["setup"] = describe_setup(each.setup)
        return found


def plan(asked: PlanFile) -> PlanResult:
    """Predict the setup that the file gives, or find the cheapest that meets its target; and show what it hangs on.
    Deterministic. ValueError: something that the file names is not there or cannot be, or no setup meets the target;
    says what is wrong and what is nearest."""
    workload, hosts, target = workload_of(asked.workload), hosts_of(asked), asked.target
    accesses = read_accesses(asked.trace.path) if asked.trace.path else None
    if target.queries_per_s and workload.is_training:
        raise ConfigError(
            f"target.queries_per_s = {target.queries_per_s:g}: the workload trains, with {workload.optimizer}; set "
            'workload.optimizer = "none" to plan serving, or ask for samples_per_s'
        )
    if accesses is None:
        demand = Demand.analytic(workload, asked.setup.policy)
    else:  # it says what tables were assumed to do
        workload = replace(workload, assumed=tuple(each for each in workload.assumed if not each.tables))
        depth = asked.setup.prefetch_depth if workload.is_training else 0  # serving fetches nothing ahead
        make_curve = functools.partial(curve, prefetch_depth=depth)
        demand = Demand.from_accesses(workload, accesses, asked.setup.policy, make_curve=make_curve)
    in_memory: Prediction | str | None = None
    if asked.is_fixed:
        given, rate = setup_of(asked, workload, hosts[0]), target.queries_per_s or None
        best = predict(given, demand, queries_per_s=rate, pricing=asked.pricing)
        found = SearchResult(best, (), ())
    else:
        found = _searched(asked, workload, demand, hosts, in_memory=asked.search.in_memory)
        if not asked.search.in_memory:
            try:
                in_memory = _searched(asked, workload, demand, hosts, in_memory=True).best
            except ValueError as error:
                in_memory = str(error)
    best, setup = found.best, found.best.setup
    demand = demand.laid_out(setup.workload)
    shown, marks, written = list[ShownCurve](), tuple[str, ...](), best.drive_writes_a_day
    for pool, load in zip(demand.pools, pool_loads(setup, demand), strict=True):
        others = "" if len(demand.pools) == 1 else f", {len(pool.tables)} tables of {pool.layout.dim}"
        held = float(setup.hosts * (load.hbm_rows + load.ddr_rows))
        shown.append(ShownCurve(f"{pool.curve.policy}{others}", pool.curve, held))
    if setup.host.storage and written > (rated := first_worn(setup.host).drive_writes_a_day):
        months = 12 * years_of_life(setup.host, written)
        last = f"its drives are written {written:.3g} times a day, rated for {rated:.3g}, and last {months:.3g} months"
        marks = (last,)
    return PlanResult(
        assumptions=tuple(assumptions(workload)),
        asked=asked,
        prediction=best,
        hosts=tuple(host.name for host in hosts),
        in_memory=in_memory,
        curves=tuple(shown),
        marginals=marginal_values(setup, demand),
        alternatives=(*(Attempt(each.setup, each) for each in found.runners_up), *found.failures),
        marks=marks,
        warnings=tuple(dict.fromkeys(_warnings(asked, best, demand))),
        sources=tuple(_sources(asked, setup, accesses)),
    )


def _searched(
    asked: PlanFile, workload: Workload, demand: Demand, hosts: tuple[Host, ...], *, in_memory: bool
) -> SearchResult:
    """The cheapest that meets the target. ValueError: there is none; says what is nearest, and what was assumed."""
    space = replace(
        asked.search,
        dtypes=asked.search.dtypes or (workload.dtype,),
        hosts=(asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts,
        in_memory=in_memory,
    )
    try:
        return search(workload, demand, hosts, asked.target, space=space, pricing=asked.pricing)
    except ConfigError:
        raise
    except ValueError as error:
        assumed = f"; assumed: {'; '.join(assumptions(workload))}" if workload.assumed else ""
        raise ValueError(f"{error}{assumed}") from None


def _warnings(asked: PlanFile, prediction: Prediction, demand: Demand) -> Iterator[str]:
    setup = prediction.setup
    for lack in lacks(asked.target, prediction):
        yield f"the target is missed: {lack.text}"
    memory, used = setup.host.ddr.capacity_bytes, setup.ddr_bytes + setup.page_cache_bytes
    if used > _FULL * memory:
        yield (
            f"{format_size(used)} of {format_size(memory)} memory are for rows and page cache; little is left for the "
            "system, the model and batches"
        )
    ddr = next(tier for tier in prediction.tiers if tier.tier == "ddr")
    if setup.workload.is_training and ddr.rows < ddr.lookups:
        yield (
            f"memory holds {ddr.rows:,.0f} rows and a batch needs {ddr.lookups:,.0f}: rows leave and come back within "
            "a batch, and none are fetched ahead"
        )
    if setup.host.accelerators and not setup.hbm_bytes:
        train = "" if why_no_gpu(setup) else "set setup.hbm to train on one, or "
        yield f"the host's GPUs are not used: {train}give a host file without them"
    if prediction.price.usd == 0:
        yield "no part has a price, so nothing is said of money"
    yield from (pool.curve.warning for pool in demand.pools if pool.curve.warning)
    for name, value in () if asked.is_fixed else vars(asked.setup).items():
        if name not in _SEARCHED and value != getattr(SetupSection(), name):
            yield f"the search does not heed setup.{name}; give setup.ddr too to predict one setup"


def _sources(asked: PlanFile, setup: Setup, accesses: Accesses | None) -> Iterator[str]:
    policy = resolve_policy(setup.policy)
    if accesses is None:
        exponents = sorted({table.exponent for table in setup.workload.tables})
        span = f"{exponents[0]:g}" if len(exponents) == 1 else f"{exponents[0]:g} to {exponents[-1]:g}"
        yield f"accesses: Zipf's law of exponent {span}, ids drawn independently; a trace of yours says more"
        if policy != "lru":
            yield f"{policy} without a trace: as if memory held the rows that are used most"
    else:
        sampled = accesses.sampling_rate
        sample = "" if sampled == 1 else f", curves by a sample of {100 * sampled:g} % of the rows"
        counted = "" if accesses.all_lookups is None else f" of {sum(accesses.all_lookups):,}"
        yield (
            f"accesses: {asked.trace.path}, {len(accesses.keys):,}{counted} in {accesses.all_batches:,} "
            f"batches{sample}; its batches are taken for those of the workload"
        )
        if accesses.all_batches < _LONG_TRACE:
            yield f"the trace has {accesses.all_batches} batches only: most rows in it are used for the first time"
    yield f"host: {setup.host.source or setup.host.name}"


def plain(value: Any) -> Any:
    """Dicts, lists, texts, numbers and None in place of dataclasses, named tuples and arrays; None for infinities."""
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(content: Any, path: Path, *, force: bool, indent: int | None = 2) -> None:
    """Write what ``plain`` makes of it. Errors as of ``partial_file``."""
    write_text(path, json.dumps(plain(content), indent=indent, allow_nan=False) + "\n", force=force)
