"""``plan``: from a plan file to its answer, and to all that a report shows of it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from ..cache.ddr import resolve_policy
from ..settings.sections import ConfigError
from ..system.sizes import format_size
from .accesses import Accesses, read_accesses
from .curves import MissRatioCurve, curve
from .demand import Demand
from .json_file import plain
from .model import predict
from .plan_file import PlanFile, SetupSection, hosts_of, query_sizes_of, setup_of, workload_of
from .prediction import Prediction, Setup, describe_setup, first_worn, years_of_life
from .search import Attempt, SearchResult, lacks, search
from .tiers import pool_loads
from .what_if import Assumption, Instead, Marginal, assumed_words, assumptions_of, marginal_values
from .workload import TableShape, Workload

_SEARCHED: Final = ("ddr", "hosts", "policy")  # keys of [setup] that a search heeds: hosts as the only count
_FULL: Final = 0.9  # of a memory: more, and the system has little left
_LONG_TRACE: Final = 20  # batches: with fewer, most of what a trace has are first uses


class ShownCurve(NamedTuple):
    """Of tables that share a cache; ``chosen_rows``: of it that the memory of all hosts holds."""

    name: str
    curve: MissRatioCurve
    chosen_rows: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer to a plan file.

    Attributes:
        hosts: names of those that were asked about.
        searched: whether the setup was chosen among others, ``num_setups`` of them, hosts counted once.
        in_memory: the cheapest that has every row in DDR or HBM and meets the target; None where the setup is given, no
            rate is asked for, or rows are in memory by the file's wish.
        curves: of the pools that the prediction is made of.
        alternatives: the next best first, then those that fail.
        marks: clauses that belong to the answer: what wears out, and what tierstore has no server for.
    """

    assumptions: tuple[Assumption, ...] = ()
    asked: PlanFile
    prediction: Prediction
    hosts: tuple[str, ...]
    searched: bool
    num_setups: int = 1
    in_memory: Instead | None = None
    curves: tuple[ShownCurve, ...] = ()
    marginals: tuple[Marginal, ...] = ()
    alternatives: tuple[Attempt, ...] = ()
    marks: tuple[str, ...] = ()
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
    question = _Question(asked)
    workload, found = question.workload, question.answer(question.workload)
    best, setup, in_memory = found.best, found.best.setup, None
    if not asked.is_fixed and asked.target.has_rate and not asked.search.in_memory:
        in_memory = Instead.of(lambda: question.answer(workload, in_memory=True).best)
    demand = question.demand(workload).laid_out(setup.workload)
    curves, most = _curves(setup, demand), asked.search.runners_up
    return PlanResult(
        assumptions=assumptions_of(workload, lambda other: question.answer(other).best),
        asked=asked,
        prediction=best,
        hosts=tuple(host.name for host in question.hosts),
        searched=not asked.is_fixed,
        num_setups=found.num_setups,
        in_memory=in_memory,
        curves=curves,
        marginals=marginal_values(setup, demand),
        alternatives=(*(Attempt(each.setup, each) for each in found.runners_up[:most]), *found.failures[:most]),
        marks=marks_of(asked, best),
        warnings=(
            *warnings_of(asked, best),
            *dict.fromkeys(each.curve.warning for each in curves if each.curve.warning),
            *(() if asked.is_fixed else _unused(asked)),
        ),
        sources=sources_of(asked, setup, question.accesses),
    )


class _Question:
    """What is asked of the file's workload, or of another in its place. ValueError as of ``plan``."""

    def __init__(self, asked: PlanFile) -> None:
        self.asked, self.workload, self.hosts = asked, workload_of(asked), hosts_of(asked)
        self._sizes, self._demands = query_sizes_of(asked), dict[tuple[TableShape, ...], Demand]()
        self.accesses = read_accesses(asked.trace.path) if asked.trace.path else None
        if asked.target.queries_per_s and self.workload.is_training:
            raise ConfigError(
                f"target.queries_per_s = {asked.target.queries_per_s:g}: the workload trains, with "
                f'{self.workload.optimizer}; set workload.optimizer = "none" to plan serving, or ask for samples_per_s'
            )
        if self.accesses is not None:  # it says the rest
            assumed = tuple(each for each in self.workload.assumed if not each.tables)
            self.workload = replace(self.workload, assumed=assumed)

    def demand(self, workload: Workload) -> Demand:
        if workload.tables not in self._demands:
            policy, depth = self.asked.setup.policy, self.asked.setup.prefetch_depth
            own = partial(curve, prefetch_depth=depth if workload.is_training else 0)  # serving fetches nothing ahead
            self._demands[workload.tables] = (
                Demand.analytic(workload, policy)
                if self.accesses is None
                else Demand.from_accesses(workload, self.accesses, policy, make_curve=own)
            )
        return self._demands[workload.tables]

    def answer(self, workload: Workload, *, in_memory: bool = False) -> SearchResult:
        """What the given setup does, or the cheapest that meets the target. ValueError: there is none; says what is
        nearest, and what was assumed."""
        asked, demand, target, sizes = self.asked, self.demand(workload), self.asked.target, self._sizes
        if asked.is_fixed:
            setup, rate = setup_of(asked, workload, self.hosts[0]), target.queries_per_s or None
            best = predict(setup, demand, query_sizes=sizes, queries_per_s=rate, pricing=asked.pricing)
            return SearchResult(best, (), (), 1)
        try:
            target.require()
        except ValueError as error:
            raise ConfigError(f"[target]: {error}; or give setup.ddr, to predict one setup") from None
        space = replace(
            asked.search,
            dtypes=asked.search.dtypes or (workload.dtype,),
            hosts=(asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts,
            in_memory=in_memory or asked.search.in_memory,
        )
        try:
            return search(workload, demand, self.hosts, target, space=space, pricing=asked.pricing, query_sizes=sizes)
        except ValueError as error:
            assumed = f"; assumed: {assumed_words(workload)}" if workload.assumed else ""
            raise ValueError(f"{error}{assumed}") from None


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


def warnings_of(asked: PlanFile, prediction: Prediction) -> tuple[str, ...]:
    setup, found = prediction.setup, [f"the target is missed: {each.text}" for each in lacks(asked.target, prediction)]
    memory, used = setup.host.ddr.capacity_bytes, setup.ddr_bytes + setup.page_cache_bytes
    if used > _FULL * memory:
        found.append(
            f"{format_size(used)} of {format_size(memory)} memory are for rows and page cache; little is left for the "
            "system, the model and batches"
        )
    ddr = next(tier for tier in prediction.tiers if tier.tier == "ddr")
    if setup.workload.is_training and ddr.rows < ddr.lookups:
        found.append(
            f"memory holds {ddr.rows:,.0f} rows and a batch needs {ddr.lookups:,.0f}: rows leave and come back within "
            "a batch, and none are fetched ahead"
        )
    if setup.host.accelerators and not setup.hbm_bytes:
        found.append("the host's GPUs are not used: set host.accelerators = 0, or 1 and setup.hbm to train on it")
    if prediction.price.usd == 0:
        found.append("no part has a price, so nothing is said of money")
    return tuple(found)


def marks_of(asked: PlanFile, prediction: Prediction) -> tuple[str, ...]:
    setup, written, found = prediction.setup, prediction.drive_writes_a_day, []
    if setup.hosts > 1 and not setup.workload.is_training:
        found.append("served by a program of yours over ranks, as tierstore serve reads all tables on each host")
    if setup.host.storage and written > (rated := first_worn(setup.host).drive_writes_a_day):
        life = years_of_life(prediction, asked.pricing)
        found.append(
            f"its drives are written {written:.3g} times a day, rated for {rated:.3g}, and last {12 * life:.3g} months"
        )
    return tuple(found)


def sources_of(asked: PlanFile, setup: Setup, accesses: Accesses | None) -> tuple[str, ...]:
    policy, host = resolve_policy(setup.policy), f"host: {setup.host.source or setup.host.name}"
    if accesses is None:
        exponents = sorted({table.exponent for table in setup.workload.tables})
        span = f"{exponents[0]:g}" if len(exponents) == 1 else f"{exponents[0]:g} to {exponents[-1]:g}"
        law = f"accesses: Zipf's law of exponent {span}, ids drawn independently; a trace of yours says more"
        counting = f"{policy} without a trace: as if memory held the rows that are used most"
        return (law, host) if policy == "lru" else (law, host, counting)
    sampled = accesses.sampling_rate
    sample = "" if sampled == 1 else f", curves by a sample of {100 * sampled:g} % of the rows"
    counted = "" if accesses.all_lookups is None else f" of {sum(accesses.all_lookups):,}"
    trace = (
        f"accesses: {asked.trace.path}, {len(accesses.keys):,}{counted} in {accesses.all_batches:,} batches{sample}; "
        "its batches are taken for those of the workload"
    )
    short = f"the trace has {accesses.all_batches} batches only: most rows in it are used for the first time"
    return (trace, host) if accesses.all_batches >= _LONG_TRACE else (trace, short, host)
