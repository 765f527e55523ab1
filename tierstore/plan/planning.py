"""``plan``: from a plan file to its answer, and to all that a report shows of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from ..cache import resolve_policy
from ..settings.sections import ConfigError
from .accesses import Accesses, once_a_batch
from .asking import accesses_of_plan, hosts_of, query_sizes_of, setup_of, space_of, target_of, workload_of
from .curves import by_table, curve, windows
from .demand import Demand
from .host import Host
from .marginal import Predict, batch_line, ddr_line, exponent_line, grid_of, marginal_values
from .model import predict
from .placement import PlacementPlan, compare, measured_demand
from .plan_file import PlanFile, SetupSection
from .prediction import Prediction, Setup
from .remarks import assumptions_of, price_parts_of, warnings_of
from .result import Alternative, Line, Placed, PlanResult, ShownCurve
from .search import SearchResult, search
from .tiers import pool_loads
from .workload import Workload

__all__ = ["Progress", "plan"]

_STAGES: Final = ("accesses", "setup", "curves", "what would change it", "placement")
_SEARCHED: Final = ("ddr", "hosts", "policy")
"""Keys of [setup] that a search heeds: hosts as the only count."""


class Progress(Protocol):
    """Told of what is done."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def plan(asked: PlanFile, *, progress: Progress | None = None) -> PlanResult:
    """Predict the setup that the file gives, or find the cheapest that meets its target; and show what it hangs on.

    Deterministic.

    Raises:
        ValueError: something that the file names is not there or cannot be, or no setup meets the target; says what is
            wrong and what is nearest.
    """

    def tell(done: int) -> None:
        if progress is not None:
            progress(_STAGES[min(done, len(_STAGES) - 1)], done, len(_STAGES))

    tell(0)
    workload, hosts, accesses = workload_of(asked), hosts_of(asked), accesses_of_plan(asked)
    if asked.target.queries_per_s and workload.is_training:
        raise ConfigError(
            f"target.queries_per_s = {asked.target.queries_per_s:g}: the workload trains, with {workload.optimizer}; "
            'set workload.optimizer = "none" to plan serving, or ask for samples_per_s'
        )
    demand = _demand(asked, workload, accesses)
    tell(1)
    alternatives: tuple[Alternative, ...] = ()
    found: SearchResult | None = None
    rate = asked.target.queries_per_s or None
    predicted = partial(predict, query_sizes=query_sizes_of(asked), queries_per_s=rate, pricing=asked.pricing)
    if asked.is_fixed:
        prediction = predicted(setup_of(asked, workload, hosts[0]), demand)
    else:
        found = _search(asked, workload, demand, hosts)
        prediction, alternatives = found.best, _alternatives(found, asked.search.runners_up)
        demand = demand.laid_out(prediction.setup.workload)
    tell(2)
    curves = _curves(asked, prediction.setup, demand, accesses)
    tell(3)
    setup = prediction.setup
    # Without a rate: latencies take long to simulate, and no plot shows them.
    quick = partial(predict, query_sizes=query_sizes_of(asked), pricing=asked.pricing)
    gains = marginal_values(setup, demand, asked.pricing)
    lines = _lines(setup, demand, quick, has_trace=accesses is not None)
    grid = grid_of(setup, demand, quick)
    tell(4)
    result = PlanResult(
        asked=asked,
        prediction=prediction,
        searched=found is not None,
        num_setups=1 if found is None else found.num_setups,
        curves=curves,
        gains=gains,
        lines=lines,
        grid=grid,
        alternatives=alternatives,
        placements=_placements(setup, demand, quick, accesses),
        price_parts=price_parts_of(setup),
        warnings=(*warnings_of(asked, prediction), *(() if found is None else _unused(asked))),
        assumptions=assumptions_of(asked, setup, accesses),
    )
    tell(len(_STAGES))
    return result


def _demand(asked: PlanFile, workload: Workload, accesses: Accesses | None) -> Demand:
    policy = asked.setup.policy
    if accesses is None:
        return Demand.analytic(workload, policy)
    return Demand.from_accesses(workload, accesses, policy, sampling_rate=asked.trace.sampling_rate)


def _search(asked: PlanFile, workload: Workload, demand: Demand, hosts: Sequence[Host]) -> SearchResult:
    return search(
        workload,
        demand,
        hosts,
        target_of(asked),
        space=space_of(asked, workload),
        pricing=asked.pricing,
        query_sizes=query_sizes_of(asked),
    )


def _alternatives(found: SearchResult, most: int) -> tuple[Alternative, ...]:
    """Those that meet the target, and as many that fail."""
    return (
        *(Alternative(each.setup, each, "") for each in found.runners_up[:most]),
        *(Alternative(each.setup, each.prediction, each.reason) for each in found.failures[:most]),
    )


def _unused(asked: PlanFile) -> list[str]:
    """What the file says and the search does not heed."""
    given, default = asked.setup, SetupSection()
    ignored = [name for name, value in vars(given).items() if name not in _SEARCHED and value != getattr(default, name)]
    return [f"the search does not heed setup.{name}; give setup.ddr too to predict one setup" for name in ignored]


def _curves(asked: PlanFile, setup: Setup, demand: Demand, accesses: Accesses | None) -> tuple[ShownCurve, ...]:
    """Those of the pools with what the plan holds of them, then what the section asks for."""
    shown = []
    for pool, load in zip(demand.pools, pool_loads(setup, demand), strict=True):
        policy = pool.curve.policy
        name = policy if len(demand.pools) == 1 else f"{policy}, {len(pool.tables)} tables of {pool.layout.dim}"
        shown.append(ShownCurve("pool", name, pool.curve, float(setup.hosts * (load.hbm_rows + load.ddr_rows))))
    if accesses is None:
        return tuple(shown)
    section, rate = asked.curves, asked.trace.sampling_rate
    distinct = once_a_batch(accesses)
    chosen = sum(each.chosen_rows or 0.0 for each in shown)
    shown += [
        ShownCurve("policy", policy, curve(distinct, policy, sampling_rate=rate))
        for policy in dict.fromkeys(map(resolve_policy, section.policies))
        if policy != resolve_policy(demand.policy)
    ]
    if section.by_table:
        found = by_table(distinct, demand.policy, sampling_rate=rate)
        shown += [ShownCurve("table", name, each) for name, each in found.items()]
    if section.windows:
        parts = windows(distinct, demand.policy, section.windows, sampling_rate=rate)
        shown += [
            ShownCurve("window", f"part {number} of {section.windows}", part.curve, chosen)
            for number, part in enumerate(parts, 1)
        ]
    return tuple(shown)


def _lines(setup: Setup, demand: Demand, predicted: Predict, *, has_trace: bool) -> tuple[Line, ...]:
    memory = ddr_line(setup, demand, predicted)
    if has_trace:
        return (memory,)
    return memory, batch_line(setup, demand.policy, predicted), exponent_line(setup, demand.policy, predicted)


def _placements(setup: Setup, demand: Demand, predicted: Predict, accesses: Accesses | None) -> tuple[Placed, ...]:
    """All strategies on the plan's hosts, one batch after another."""

    def store_model(ddr_bytes: float, hbm_bytes: float) -> Prediction:
        own = replace(setup, ddr_bytes=ddr_bytes, hbm_bytes=hbm_bytes, page_cache_bytes=0.0)
        return predicted(own, demand)

    by_table = None if accesses is None else measured_demand(setup.workload, accesses)
    plans = compare(setup.workload, setup.host, hosts=setup.hosts, demand=by_table, store_model=store_model)
    return tuple(map(_placed, plans))


def _placed(found: PlacementPlan) -> Placed:
    step = found.step
    if step is None or not found.fits:
        return Placed(found.strategy, math.inf, "", found.why or "it does not fit")
    return Placed(found.strategy, step.step_s, step.bottleneck, "")
