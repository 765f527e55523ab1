"""``plan``: from a plan file to what it names, to its answer, and to all that a report shows of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..settings.sections import ConfigError
from ..system.excerpt import excerpt
from ..system.sizes import format_size, parse_size
from .accesses import Accesses, read_accesses
from .assumptions import Assumption, Instead, assumed_words, assumptions_of
from .curves import curve
from .demand import Demand
from .host import Host, with_accelerators
from .marginal import marginal_values
from .model import predict
from .parts import host_names, load_host
from .plan_file import PlanFile, SetupSection
from .prediction import Prediction, Setup
from .presets import PRESETS, load_workload, preset, scaled
from .queueing import parse_query_sizes
from .result import PlanResult, ShownCurve, marks_of, sources_of, warnings_of
from .search import Attempt, SearchResult, search, with_memory
from .tiers import pool_loads
from .workload import Workload, specified

_Part = TypeVar("_Part")
_SEARCHED = ("ddr", "hosts", "policy")
"""Keys of [setup] that a search heeds: hosts as the only count."""


def plan(asked: PlanFile, *, progress: Callable[[str, int, int], None] | None = None) -> PlanResult:
    """Predict the setup that the file gives, or find the cheapest that meets its target; and show what it hangs on.

    Deterministic.

    Args:
        progress: called with a stage, the stages done and their number.

    Raises:
        ValueError: something that the file names is not there or cannot be, or no setup meets the target; says what is
            wrong and what is nearest.
    """
    tell = progress or (lambda _stage, _done, _total: None)
    tell("accesses", 0, 4)
    question, workload = question_of(asked)
    demands = {workload.tables: question.demand(workload)}

    def answer(other: Workload, own: Question = question) -> Prediction:
        if other.tables not in demands:
            demands[other.tables] = question.demand(other)
        return own.answer(other, demands[other.tables]).best

    tell("setup", 1, 4)
    found = question.answer(workload, demands[workload.tables])
    best, setup = found.best, found.best.setup
    tell("assumptions", 2, 4)
    assumptions = assumptions_of(workload, answer)
    tell("all rows in memory", 3, 4)
    in_memory, in_memory_if_off = None, tuple[Assumption, ...]()
    if not asked.is_fixed and asked.target.has_rate and not asked.search.in_memory:
        all_rows = question._replace(asked=replace(asked, search=replace(asked.search, in_memory=True)))
        in_memory = Instead.of(lambda: answer(workload, all_rows))
        in_memory_if_off = assumptions_of(workload, lambda other: answer(other, all_rows))
    demand = demands[workload.tables].laid_out(setup.workload)
    curves, most = _curves(setup, demand), asked.search.runners_up
    result = PlanResult(
        assumptions=assumptions,
        asked=asked,
        prediction=best,
        hosts=tuple(host.name for host in question.hosts),
        searched=not asked.is_fixed,
        num_setups=found.num_setups,
        in_memory=in_memory,
        in_memory_if_off=in_memory_if_off,
        curves=curves,
        marginals=marginal_values(setup, demand),
        alternatives=(
            *(Attempt(each.setup, each) for each in found.runners_up[:most]),
            *found.failures[:most],
        ),
        marks=marks_of(asked, best),
        warnings=(
            *warnings_of(asked, best),
            *dict.fromkeys(each.curve.warning for each in curves if each.curve.warning),
            *(() if asked.is_fixed else _unused(asked)),
        ),
        sources=sources_of(asked, setup, question.accesses),
    )
    tell("done", 4, 4)
    return result


class Question(NamedTuple):
    """What is asked of a workload, or of another in its place."""

    asked: PlanFile
    hosts: tuple[Host, ...]
    sizes: tuple[float, ...] | None
    accesses: Accesses | None

    def demand(self, workload: Workload) -> Demand:
        policy = self.asked.setup.policy
        if self.accesses is None:
            return Demand.analytic(workload, policy)
        depth = self.asked.setup.prefetch_depth if workload.is_training else 0  # serving fetches nothing ahead
        return Demand.from_accesses(workload, self.accesses, policy, make_curve=partial(curve, prefetch_depth=depth))

    def answer(self, workload: Workload, demand: Demand) -> SearchResult:
        """What the given setup does, which is then the only one; or the cheapest that meets the target. ValueError:
        there is none; says what is nearest, and what was assumed."""
        asked, pricing = self.asked, self.asked.pricing
        if asked.is_fixed:
            setup, queries_per_s = setup_of(asked, workload, self.hosts[0]), asked.target.queries_per_s or None
            prediction = predict(setup, demand, query_sizes=self.sizes, queries_per_s=queries_per_s, pricing=pricing)
            return SearchResult(prediction, (), (), 1)
        target, hosts = asked.target, (asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts
        space = replace(asked.search, dtypes=asked.search.dtypes or (workload.dtype,), hosts=hosts)
        try:
            target.require()
        except ValueError as error:
            raise ConfigError(f"[target]: {error}; or give setup.ddr, to predict one setup") from None
        try:
            return search(workload, demand, self.hosts, target, space=space, pricing=pricing, query_sizes=self.sizes)
        except ValueError as error:
            assumed = f"; assumed: {assumed_words(workload)}" if workload.assumed else ""
            raise ValueError(f"{error}{assumed}") from None


def question_of(asked: PlanFile) -> tuple[Question, Workload]:
    """ValueError as of ``plan``."""
    workload, hosts, sizes = workload_of(asked), hosts_of(asked), query_sizes_of(asked)
    accesses = read_accesses(asked.trace.path) if asked.trace.path else None
    if asked.target.queries_per_s and workload.is_training:
        raise ConfigError(
            f"target.queries_per_s = {asked.target.queries_per_s:g}: the workload trains, with {workload.optimizer}; "
            'set workload.optimizer = "none" to plan serving, or ask for samples_per_s'
        )
    if accesses is not None:  # it says the rest
        workload = replace(workload, assumed=tuple(each for each in workload.assumed if not each.tables))
    return Question(asked, hosts, sizes, accesses), workload


def _unused(asked: PlanFile) -> list[str]:
    """What the file says and the search does not heed."""
    given, default = asked.setup, SetupSection()
    ignored = [name for name, value in vars(given).items() if name not in _SEARCHED and value != getattr(default, name)]
    return [f"the search does not heed setup.{name}; give setup.ddr too to predict one setup" for name in ignored]


def _curves(setup: Setup, demand: Demand) -> tuple[ShownCurve, ...]:
    """Those of the pools, with what the plan holds of them."""
    shown = []
    for pool, load in zip(demand.pools, pool_loads(setup, demand), strict=True):
        policy = pool.curve.policy
        name = policy if len(demand.pools) == 1 else f"{policy}, {len(pool.tables)} tables of {pool.layout.dim}"
        shown.append(ShownCurve(name, pool.curve, float(setup.hosts * (load.hbm_rows + load.ddr_rows))))
    return tuple(shown)


# What the file names


def workload_of(asked: PlanFile) -> Workload:
    """ValueError: it names none, or one that there is not, or a value that cannot be."""
    section = asked.workload
    if section.preset:
        found = preset(section.preset)
    elif section.file:
        found = load_workload(Path(section.file))
    elif section.tables:
        found = specified(section.tables, name=section.name or "workload")
    else:
        raise ConfigError(
            f"workload.preset = '': give one of {', '.join(PRESETS)}; or workload.file, or [[workload.tables]]"
        )
    found = scaled(found, section.scale) if section.scale != 1 else found
    given = {
        name: getattr(section, name)
        for name in ("name", "batch_samples", "optimizer", "dtype", "dense_flops")
        if getattr(section, name)
    }
    if section.dense_flops:  # the layers are not those of the file then
        found = replace(found, dense_products=0.0, dense_values=0.0)
        given["assumed"] = tuple(each for each in found.assumed if each.figure != "dense_flops")
    try:
        return replace(found, **given)
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None


def hosts_of(asked: PlanFile) -> tuple[Host, ...]:
    """The host, with the counts that the section says, and after it those that the search compares it with.
    ValueError: it names none, or one that there is not, or counts parts that the host has none of."""
    section = asked.host
    if not section.name and not section.file:
        raise ConfigError(f"host.name = '': give one of {', '.join(host_names())}; or host.file")
    own = load_host(section.name) if section.name else load_host(Path(section.file))
    if section.ssds >= 0:
        own = replace(own, storage=_repeated(own.storage, section.ssds, "ssds", own.name))
    if section.accelerators >= 0:
        own = with_accelerators(own, _repeated(own.accelerators, section.accelerators, "accelerators", own.name))
    if section.memory != "":
        size_bytes = parse_size(section.memory, name="memory", memory_bytes=int(own.ddr.capacity_bytes))
        if not size_bytes or not own.ddr.capacity_bytes:
            raise ConfigError(
                f"host.memory = {excerpt(section.memory)} is {format_size(size_bytes)}, host {excerpt(own.name)} has "
                f'{format_size(int(own.ddr.capacity_bytes))}: expected a size, as "512GiB", or "50%" of what it has'
            )
        own = with_memory(own, size_bytes)
    return own, *map(load_host, section.others)


def _repeated(parts: tuple[_Part, ...], count: int, key: str, name: str) -> tuple[_Part, ...]:
    if count and not parts:
        raise ConfigError(f"host.{key} = {count}: host {excerpt(name)} has none to have more of")
    return parts[:1] * count


def setup_of(asked: PlanFile, workload: Workload, host: Host) -> Setup:
    """The setup that the file gives; what it leaves open is the least: one host, no memory of GPUs. ValueError: a
    size cannot be read."""
    from ..dist.placement import RankCosts

    section = asked.setup
    memory = int(host.ddr.capacity_bytes)
    hbm = int(min((gpu.hbm.capacity_bytes for gpu in host.accelerators), default=0))

    def size(value: int | str, key: str, of_bytes: int) -> int:
        given = 0 if value == "" else value
        return parse_size(given, name=f"setup.{key}", table_bytes=workload.table_bytes, memory_bytes=of_bytes)

    return Setup(
        workload=workload,
        host=host,
        ddr_bytes=size(section.ddr, "ddr", memory),
        hbm_bytes=size(section.hbm, "hbm", hbm),
        page_cache_bytes=size(section.page_cache, "page_cache", memory),
        hosts=max(1, section.hosts),
        policy=section.policy,
        prefetch_depth=section.prefetch_depth,
        threads=section.threads or host.processor.cores,
        rows_per_read=section.rows_per_read,
        workers=section.workers,
        replicas=max(1, section.replicas),
        batch_samples_max=section.batch_samples_max,
        wire=section.wire,
        rank_costs=RankCosts.load(section.rank_costs) if section.rank_costs else None,
    )


def query_sizes_of(asked: PlanFile) -> tuple[float, ...] | None:
    """Samples of queries, each as likely; None where the file names none. ValueError: the file cannot be read, or
    has something else in it."""
    path = asked.target.query_sizes
    if not path:
        return None
    try:
        return parse_query_sizes(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.query_sizes = {excerpt(path)}: {error}") from None
