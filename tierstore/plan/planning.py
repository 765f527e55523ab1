"""``plan``: from a plan file to its answer, and to all that a report shows of it."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..cache.ddr import resolve_policy
from ..settings.sections import ConfigError
from ..system.files import write_text
from ..system.sizes import format_size
from .curves import MissRatioCurve, curve
from .demand import Demand
from .host import Host, Setup, describe_setup, first_worn, years_of_life
from .model import Marginal, Prediction, marginal_values, predict
from .plan_file import PlanFile, SetupSection, hosts_of, query_sizes_of, setup_of, workload_of
from .search import Attempt, SearchResult, lacks, search
from .tiers import pool_loads
from .traces import Accesses, read_accesses
from .workload import Workload, assumptions

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
        assumptions: what nobody said, each with the value that was taken.
        hosts: names of those that were asked about.
        searched: whether the setup was chosen among others, ``num_setups`` of them, hosts counted once.
        in_memory: the cheapest that has every row in DDR or HBM and meets the target, or why there is none; None where
            the setup is given, no rate is asked for, or rows are in memory by the file's wish.
        curves: of the pools that the prediction is made of.
        alternatives: the next best first, then those that fail.
        marks: clauses that belong to the answer: what wears out.
    """

    assumptions: tuple[str, ...] = ()
    asked: PlanFile
    prediction: Prediction
    hosts: tuple[str, ...]
    searched: bool
    num_setups: int = 1
    in_memory: Prediction | str | None = None
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
    workload, hosts, target = workload_of(asked), hosts_of(asked), asked.target
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
        make_curve = partial(curve, prefetch_depth=depth)
        demand = Demand.from_accesses(workload, accesses, asked.setup.policy, make_curve=make_curve)
    in_memory: Prediction | str | None = None
    if asked.is_fixed:
        sizes, rate = query_sizes_of(asked), target.queries_per_s or None
        given = setup_of(asked, workload, hosts[0])
        best = predict(given, demand, query_sizes=sizes, queries_per_s=rate, pricing=asked.pricing)
        found = SearchResult(best, (), (), 1)
    else:
        found = _searched(asked, workload, demand, hosts, in_memory=asked.search.in_memory)
        if target.has_rate and not asked.search.in_memory:
            try:
                in_memory = _searched(asked, workload, demand, hosts, in_memory=True).best
            except ValueError as error:
                in_memory = str(error)
    best, setup, most = found.best, found.best.setup, asked.search.runners_up
    demand = demand.laid_out(setup.workload)
    curves = tuple(_curves(setup, demand))
    return PlanResult(
        assumptions=tuple(assumptions(workload)),
        asked=asked,
        prediction=best,
        hosts=tuple(host.name for host in hosts),
        searched=not asked.is_fixed,
        num_setups=found.num_setups,
        in_memory=in_memory,
        curves=curves,
        marginals=marginal_values(setup, demand),
        alternatives=(*(Attempt(each.setup, each) for each in found.runners_up[:most]), *found.failures[:most]),
        marks=tuple(_marks(asked, best)),
        warnings=tuple(dict.fromkeys(_warnings(asked, best, curves))),
        sources=tuple(_sources(asked, setup, accesses)),
    )


def _searched(
    asked: PlanFile, workload: Workload, demand: Demand, hosts: tuple[Host, ...], *, in_memory: bool
) -> SearchResult:
    """The cheapest that meets the target. ValueError: there is none; says what is nearest, and what was assumed."""
    try:
        asked.target.require()
    except ValueError as error:
        raise ConfigError(f"[target]: {error}; or give setup.ddr, to predict one setup") from None
    space = replace(
        asked.search,
        dtypes=asked.search.dtypes or (workload.dtype,),
        hosts=(asked.setup.hosts,) if asked.setup.hosts else asked.search.hosts,
        in_memory=in_memory,
    )
    sizes = query_sizes_of(asked)
    try:
        return search(workload, demand, hosts, asked.target, space=space, pricing=asked.pricing, query_sizes=sizes)
    except ValueError as error:
        assumed = f"; assumed: {'; '.join(assumptions(workload))}" if workload.assumed else ""
        raise ValueError(f"{error}{assumed}") from None


def _curves(setup: Setup, demand: Demand) -> Iterator[ShownCurve]:
    """Those of the pools, with what the plan holds of them."""
    for pool, load in zip(demand.pools, pool_loads(setup, demand), strict=True):
        policy = pool.curve.policy
        name = policy if len(demand.pools) == 1 else f"{policy}, {len(pool.tables)} tables of {pool.layout.dim}"
        yield ShownCurve(name, pool.curve, float(setup.hosts * (load.hbm_rows + load.ddr_rows)))


def _warnings(asked: PlanFile, prediction: Prediction, curves: tuple[ShownCurve, ...]) -> Iterator[str]:
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
        yield "the host's GPUs are not used: set host.accelerators = 0, or 1 and setup.hbm to train on it"
    if prediction.price.usd == 0:
        yield "no part has a price, so nothing is said of money"
    yield from (each.curve.warning for each in curves if each.curve.warning)
    for name, value in () if asked.is_fixed else vars(asked.setup).items():
        if name not in _SEARCHED and value != getattr(SetupSection(), name):
            yield f"the search does not heed setup.{name}; give setup.ddr too to predict one setup"


def _marks(asked: PlanFile, prediction: Prediction) -> Iterator[str]:
    setup, written = prediction.setup, prediction.drive_writes_a_day
    if setup.host.storage and written > (rated := first_worn(setup.host).drive_writes_a_day):
        months = 12 * years_of_life(setup.host, written, asked.pricing)
        yield f"its drives are written {written:.3g} times a day, rated for {rated:.3g}, and last {months:.3g} months"


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
