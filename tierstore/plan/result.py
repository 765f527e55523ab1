"""What a plan found: the answer and what supports it, for the terminal, the page and JSON; and what is said beside the
figures: warnings, and where figures come from."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..cache import resolve_policy
from ..system.sizes import format_size
from .accesses import Accesses
from .assumptions import Assumption, Instead, describe_setup
from .curves import MissRatioCurve
from .host import parts_of
from .json_file import plain
from .marginal import Marginal
from .plan_file import PlanFile
from .prediction import Prediction, Setup, rate
from .price import years_of_life
from .search import Attempt, lacks

_FULL = 0.9
"""Of a memory: more, and the system has little left."""
_LONG_TRACE = 20
"""Batches: with fewer, most of what a trace has are first uses."""


class ShownCurve(NamedTuple):
    """A miss-ratio curve of tables that share a cache; ``chosen_rows``: of it that the plan's memory holds, of all
    hosts."""

    name: str
    curve: MissRatioCurve
    chosen_rows: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The answer to a plan file.

    Attributes:
        hosts: names of those that were asked about.
        searched: whether the setup was chosen among others, rather than given.
        num_setups: looked at, hosts counted once.
        in_memory: the cheapest that has every row in DDR or HBM and meets the target; None where the setup is given, no
            rate is asked for, or rows are in memory by the file's wish.
        in_memory_if_off: what that becomes if an assumption is off; in the order of ``assumptions``.
        curves: of the pools that the prediction is made of.
        marginals: the best first.
        alternatives: the next best first, then those that fail.
        marks: clauses that belong to the answer: what wears out, and what tierstore has no server for.
        warnings: sentences.
        assumptions: what nobody gave, and what the answer becomes if it is off.
        sources: sentences that say where figures come from.
    """

    assumptions: tuple[Assumption, ...] = ()
    asked: PlanFile
    prediction: Prediction
    hosts: tuple[str, ...]
    searched: bool
    num_setups: int = 1
    in_memory: Instead | None = None
    in_memory_if_off: tuple[Assumption, ...] = ()
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


def warnings_of(asked: PlanFile, prediction: Prediction) -> tuple[str, ...]:
    setup, latency, target = prediction.setup, prediction.latency, asked.target
    found = [f"the target is missed: {lack.text}" for lack in lacks(target, prediction)]
    if latency is not None and math.isinf(latency.p99_s):
        found.append(
            f"the target is missed: {rate(latency.queries_per_s)} queries/s come faster than they are answered"
        )
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
    if (target.p95_ms or target.p99_ms) and not target.queries_per_s:
        found.append("no latency is given: target.p95_ms and p99_ms are of queries at a rate, target.queries_per_s")
    return tuple(found)


def marks_of(asked: PlanFile, prediction: Prediction) -> tuple[str, ...]:
    setup, written, found = prediction.setup, prediction.drive_writes_a_day, []
    if setup.hosts > 1 and not setup.workload.is_training:
        found.append("served by a program of yours over ranks, as tierstore serve reads all tables on each host")
    if setup.host.storage and written > (rated := min(drive.drive_writes_a_day for drive in setup.host.storage)):
        life = years_of_life(prediction, asked.pricing)
        found.append(
            f"its drives are written {written:.3g} times a day, rated for {rated:.3g}, and last {12 * life:.3g} months"
        )
    return tuple(found)


def sources_of(asked: PlanFile, setup: Setup, accesses: Accesses | None) -> tuple[str, ...]:
    policy, parts = resolve_policy(setup.policy), parts_of(setup.host)
    host = f"host: {f'parts: {parts}' if parts else setup.host.source or setup.host.name}"
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
