"""``plan``: from a plan file to its answer, and to all that a report shows of it.

One TOML file says what is to be planned. The help of a section's field is what ``--keys`` shows.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np

from ..cache.ddr import resolve_policy
from ..settings import sections
from ..settings.sections import Checked, ConfigError, Override, option
from ..system.checks import excerpt
from ..system.files import write_text
from ..system.sizes import format_size, parse_size
from .curves import MissRatioCurve
from .demand import Demand, pool_loads
from .host import (
    MAX_HOSTS,
    REQUEST_BATCHES,
    SERVED_BATCHES,
    Choices,
    Host,
    Pricing,
    Setup,
    default_threads,
    describe_setup,
    example_hosts,
    load_host,
)
from .model import Marginal, Prediction, at_rate, marginal_values, predict, why_no_gpu
from .search import Attempt, SearchSpace, Target, lacks, search
from .traces import Accesses, read_accesses
from .workload import OF_RUNS, Assumption, Workload, WorkloadSection, assumptions, workload_of

_T = TypeVar("_T")
_SEARCHED: Final = ("ddr", "hosts", "policy")  # keys of [setup] that a search heeds: hosts as the only count
_FULL: Final = 0.9  # of a memory: more, and the system has little left
_LONG_TRACE: Final = 20  # batches: with fewer, most of what a trace has are first uses


@dataclass(frozen=True, kw_only=True)
class TraceSection(Checked):
    """[trace]: which rows are asked for. Without one the tables' exponents say it."""

    path: str = option("", "a trace, of tierstore trace or a recording")


@dataclass(frozen=True, kw_only=True)
class HostSection(Checked):
    """[host]: the machine."""

    name: str = option("", 'one of tierstore plan hosts; "": a search looks at all of them')
    file: str = option("", "a host in JSON, as tierstore plan measure writes one")
    others: tuple[str, ...] = option(
        (), "names or files of hosts that the search compares with it, or with all examples"
    )

    def __post_init__(self) -> None:
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
        high=MAX_HOSTS,
    )
    policy: Literal["auto", "lru", "lfu", "tinylfu"] = option(
        "auto", "which rows leave memory first: auto, lru, lfu or tinylfu"
    )
    threads: int = option(0, "of a process; 0: all cores, in serving all but one over the workers", low=0, high=1 << 16)
    rank_costs: str = option(
        "", 'of training: file of tierstore shard measure, if ranks share a host; "": each has a host of its own'
    )


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


def load(path: str | Path | None, overrides: Iterable[Override] = ()) -> PlanFile:
    """As of ``sections.load_sections``; without a path of what the overrides say."""
    if path is not None and OF_RUNS & set(sections.read_toml(Path(path), "plan file")):
        raise ConfigError(
            f"{path} is a run file of tierstore train; tierstore plan --set workload.file={path} --samples 50000 plans "
            "for what it trains"
        )
    return sections.load_sections(PlanFile, path, overrides, what="plan file")


def hosts_of(asked: PlanFile, *, is_training: bool) -> tuple[Host, ...]:
    """The host, or all examples that may be of use, and those that a search compares with it. ValueError: one setup has
    no host."""
    section = asked.host
    if section.name or section.file:
        own = [load_host(section.name or Path(section.file))]
    elif asked.is_fixed:
        raise ConfigError(f"host.name = '': give one of {', '.join(example_hosts())}; or host.file")
    else:
        own = [host for host in example_hosts().values() if is_training or not host.accelerators]
    return *own, *(() if asked.is_fixed else map(load_host, section.others))


def setup_of(asked: PlanFile, workload: Workload, host: Host) -> Setup:
    """What the file leaves open is the least: one host, no memory of GPUs. ValueError: a size cannot be read."""
    from ..dist.placement import RankCosts

    section, memory = asked.setup, int(host.ddr.capacity_bytes)
    hbm = int(min((gpu.hbm.capacity_bytes for gpu in host.accelerators), default=memory))  # of no GPU any is an error

    def size(key: str, of_bytes: int) -> int:
        given = getattr(section, key) or 0
        return parse_size(given, name=f"setup.{key}", table_bytes=workload.table_bytes, memory_bytes=of_bytes)

    return Setup(
        workload=workload,
        host=host,
        ddr_bytes=size("ddr", memory),
        hbm_bytes=size("hbm", hbm),
        page_cache_bytes=size("page_cache", memory),
        policy=section.policy,
        threads=section.threads or default_threads(host, section.workers, is_training=workload.is_training),
        rank_costs=_read("setup.rank_costs", section.rank_costs, RankCosts.load),
        hosts=max(1, section.hosts),
        **{each.name: getattr(section, each.name) for each in fields(Choices)},
    )


class ShownCurve(NamedTuple):
    """Of tables that share a cache; ``chosen_rows``: of it that the memory of all hosts holds."""

    name: str
    curve: MissRatioCurve
    chosen_rows: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer to a plan file. ``missed``: why it is none, with what is nearest; then that is what all else is of."""

    assumptions: tuple[Assumption, ...] = ()  # what nobody said, each with the value that was taken
    asked: PlanFile
    attempts: tuple[Attempt, ...]  # the answer, and of other hosts what is cheapest, or nearest
    missed: str = ""
    hosts: tuple[str, ...]  # names of those that were asked about
    # The cheapest that has every row in DDR or HBM and meets the target, or why there is none; None where the setup is
    # given, or rows are in memory by the file's wish.
    in_memory: Attempt | None = None
    curves: tuple[ShownCurve, ...] = ()  # of the pools that the prediction is made of
    marginals: tuple[Marginal, ...] = ()
    warnings: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def prediction(self) -> Prediction | None:
        """Of the answer; None if it is none that fits its host."""
        return self.attempts[0].prediction

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what is unbounded is None. Setups that were not chosen are a line each."""
        found: dict[str, Any] = plain(self)
        for own, each in zip(found["attempts"], self.attempts, strict=True):
            own["setup"] = describe_setup(each.setup)
        return found | {"prediction": found["attempts"][0]["prediction"]}


def plan(asked: PlanFile, *, progress: Callable[[int, int], None] | None = None) -> PlanResult:
    """Predict the setup that the file gives, or find the cheapest of each host that meets its target; and show what it
    hangs on. Deterministic. ``progress``: called with the hosts that are done, and all. ValueError: something that the
    file names is not there or cannot be; says what is wrong and what to do."""
    target = asked.target
    workload = workload_of(asked.workload, is_training=target.samples_per_s > 0)
    target.check(workload)
    hosts = hosts_of(asked, is_training=workload.is_training)
    accesses = _read("trace.path", asked.trace.path, read_accesses)
    if accesses is None:
        demand = Demand.analytic(workload, asked.setup.policy)
    else:  # it says what tables were assumed to do
        workload = replace(workload, assumed=tuple(each for each in workload.assumed if not each.tables))
        setup = asked.setup if asked.is_fixed else SetupSection()
        depth = setup.prefetch_depth if workload.is_training else 0  # serving fetches nothing ahead
        demand = Demand.from_accesses(workload, accesses, asked.setup.policy, prefetch_depth=depth)
    result = PlanResult(
        asked=asked,
        hosts=tuple(host.name for host in hosts),
        assumptions=(*assumptions(workload), *_assumed_of_hosts(asked, hosts[0], workload)),
        sources=tuple(_sources(asked, accesses)),
        warnings=tuple(_of_other_batches(accesses, workload)),
        **_attempts(asked, workload, demand, hosts, progress),
    )
    return result if result.prediction is None else _shown(result, result.prediction, demand)


def _read(key: str, path: str, read: Callable[[str], _T]) -> _T | None:
    """What is in a file, if one is named. ConfigError names the key."""
    try:
        return read(path) if path else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {excerpt(path)}: {error}; or leave {key} out") from None


def _attempts(
    asked: PlanFile, workload: Workload, demand: Demand, hosts: tuple[Host, ...],
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:  # fmt: skip
    """Fields of the result: what was predicted or found."""
    if asked.is_fixed:
        given = setup_of(asked, workload, hosts[0])
        found = at_rate(predict(given, demand, pricing=asked.pricing), asked.target.queries_per_s)
        return {"attempts": (Attempt(given, found),)}
    space = replace(asked.search, hosts=(asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts)
    look = functools.partial(search, workload, demand, hosts, asked.target, pricing=asked.pricing)
    result = look(space=space, progress=progress)
    in_memory = None if space.in_memory else look(space=replace(space, in_memory=True)).attempts[0]
    return {"attempts": result.attempts, "missed": result.missed, "in_memory": in_memory}


def _shown(result: PlanResult, best: Prediction, demand: Demand) -> PlanResult:
    """With what supports the prediction."""
    setup, shown = best.setup, []
    for pool, load in zip(demand.pools, pool_loads(setup, demand), strict=True):
        others = "" if len(demand.pools) == 1 else f", {len(pool.tables)} tables of {load.layout.dim}"
        held = float(setup.parts * (load.hbm_rows + load.ddr_rows))
        shown.append(ShownCurve(f"{pool.curve.policy}{others}", pool.curve, held))
    return replace(
        result,
        curves=tuple(shown),
        marginals=marginal_values(setup, demand),
        warnings=tuple(dict.fromkeys((*result.warnings, *_warnings(result.asked, best, demand)))),
        sources=(*result.sources, f"host: {setup.host.source or setup.host.name}"),
    )


def _assumed_of_hosts(asked: PlanFile, host: Host, workload: Workload) -> Iterator[Assumption]:
    if asked.target.queries_per_s and not asked.target.p99_ms:
        yield Assumption("target.p99_ms", "queries may wait as long as they do")
    if not asked.host.file:
        yield Assumption("host.file", "hosts: prices of 2024, makers' figures, costs of an EPYC's core")
    if not workload.is_training:
        request_us, batch_us = (times * host.costs.batch_us for times in (REQUEST_BATCHES, SERVED_BATCHES))
        text = f"costs.batch_us: {request_us:,.0f} µs of a core for a request, {batch_us:,.0f} for a batch"
        yield Assumption("host.file", text)
    for each in fields(Pricing):
        if (value := getattr(asked.pricing, each.name)) == each.default:
            yield Assumption(f"pricing.{each.name}", f"{each.metadata['help']}: {value:g}")


def _warnings(asked: PlanFile, prediction: Prediction, demand: Demand) -> Iterator[str]:
    setup = prediction.setup
    for lack in lacks(asked.target, prediction) if asked.is_fixed else ():
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
    written, rated, years = prediction.wear
    if written > rated:
        text = f"its drives are written {written:.3g} times a day, rated for {rated:.3g}"
        yield f"{text}, and last {12 * years:.3g} months"
    if prediction.price.usd == 0:
        yield "no part has a price, so nothing is said of money"
    yield from (pool.curve.warning for pool in demand.pools if pool.curve.warning)
    yield from _unheeded(asked)


def _of_other_batches(accesses: Accesses | None, workload: Workload) -> Iterator[str]:
    traced, own = accesses.batch_samples if accesses else 0, workload.batch_samples
    if traced not in (0, own):
        yield (
            f"the trace's batches have {traced:,} samples, the workload's {own:,} (workload.batch_samples): a batch is "
            "predicted to look up what the trace's do"
        )


def _unheeded(asked: PlanFile) -> Iterator[str]:
    """What was given in vain."""
    if asked.is_fixed:
        given, why = {"host.others": asked.host.others, "[search]": asked.search != SearchSpace()}, "setup.ddr is given"
        cure = "leave setup.ddr out to search"
    else:
        others = {name: value for name, value in vars(asked.setup).items() if name not in _SEARCHED}
        given = {f"setup.{name}": value != getattr(SetupSection(), name) for name, value in others.items()}
        why, cure = "the search decides it", "give setup.ddr too to predict one setup"
    yield from (f"{name} is not heeded, as {why}; {cure}" for name, is_given in given.items() if is_given)


def _sources(asked: PlanFile, accesses: Accesses | None) -> Iterator[str]:
    policy = resolve_policy(asked.setup.policy)
    if accesses is None:
        held = "" if policy == "lru" else f"; {policy} as if memory held the rows that are used most"
        yield f"accesses: Zipf's law, ids drawn independently{held}; a trace of yours says more"
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
