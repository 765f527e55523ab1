"""Part "curves": are miss-ratio curves those of stores, and how far is a sample's from them?"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.plan import Accesses
from tierstore.plan.traces.zipf import draw_zipf

from ..common import Goal, Run, Table
from ..data import criteo_keys, find_criteo
from ..parts import Part, Told
from .beside_stores import POLICIES as STORE_POLICIES
from .beside_stores import errors_of, traces
from .curves import one_by_one, sampled_errors

__all__ = ["PART"]


def _workloads(request: Run) -> Iterator[tuple[str, Accesses]]:
    config = request.config
    criteo = find_criteo()
    if criteo is not None:
        yield "Criteo's lookups", one_by_one(criteo_keys(criteo))
    ids = draw_zipf(config["zipf_rows"], config["exponent"], config["zipf_accesses"], seed=config["seed"])
    yield f"Zipf {config['exponent']}", one_by_one(ids)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    stores, sampled = [], []
    for workload in traces(config):
        for policy, depth in itertools.product(STORE_POLICIES, config["store_depths"]):
            found = errors_of(workload, policy, depth, config["store_sizes"])
            print(f"  {workload.name}, {policy}, {depth} ahead: {found.worst:.2f} points off a store", flush=True)
            stores.append(dataclasses.asdict(found))
    for name, accesses in _workloads(request):
        if request.quick:
            accesses = one_by_one(accesses.keys[:20_000])
        rate, seeds = config["sampling_rate"], config["sampling_seeds"]
        for error in sampled_errors(name, accesses, rate=rate, num_seeds=seeds):
            print(f"  {name}, {error.policy}: {error.mean_points:.2f} points off from a sample", flush=True)
            sampled.append(dataclasses.asdict(error) | {"mean_points": error.mean_points})
    return {"stores": stores, "sampled": sampled}


def _tell(figures: dict[str, Any]) -> Told:
    goals = []
    for name, (mean, worst) in _off_stores(figures).items():
        goals += [
            Goal(name=f"{name}: points that exact curves are off stores, on average", value=mean, at_most=0.5),
            Goal(name=f"{name}: points that exact curves are off stores, at worst", value=worst, at_most=2),
        ]
    goals += [
        Goal(
            name=f"{each['workload']}, {each['policy']}: points that a sample's curve is off, on average",
            value=round(each["mean_points"], 3),
            at_most=1,
        )
        for each in figures["sampled"]
    ]
    return Told(tables=[_store_table(figures), _sampled_table(figures)], goals=goals, notes=[_NOTE])


class _Off(NamedTuple):
    mean: float
    worst: float


def _off_stores(figures: dict[str, Any]) -> dict[str, _Off]:
    """Points off, by policy and batches ahead."""
    points: dict[str, list[float]] = {}
    for each in figures["stores"]:
        ahead = f", {each['depth']} batches ahead" if each["depth"] else ""
        points.setdefault(f"{each['policy']}{ahead}", []).extend(map(abs, each["points"]))
    return {name: _Off(round(float(np.mean(off)), 3), round(max(off), 3)) for name, off in points.items()}


def _store_table(figures: dict[str, Any]) -> Table:
    rows = []
    for each in figures["stores"]:
        off, largest = np.abs(each["points"]), each["largest_batch"]
        sizes = f"{each['sizes'][0] / largest:.1f} - {each['sizes'][-1] / largest:.0f}"
        hit_rates = f"{min(each['hit_rates']):.2f} - {max(each['hit_rates']):.2f}"
        rows.append(
            [
                each["trace"], each["policy"], str(each["depth"]), sizes, hit_rates, f"{off.mean():.2f}",
                f"{off.max():.2f}",
            ]
        )  # fmt: skip
    columns = ["trace", "policy", "batches ahead", "sizes, of the largest batch", "hit rates", "points off", "worst"]
    return Table(title="exact curves beside stores that look up the same", columns=columns, rows=rows)


def _sampled_table(figures: dict[str, Any]) -> Table:
    rows = [
        [
            f"{each['workload']}, {each['policy']}", f"{each['sampled_rows']:,}", f"{each['mean_points']:.2f}",
            f"{max(each['points']):.2f}", f"{np.mean(each['plain_points']):.2f}",
            f"{each['sampled_s'] / each['exact_s']:.1%}",
        ]
        for each in figures["sampled"]
    ]  # fmt: skip
    columns = ["of", "rows", "points off", "worst seed", "by hash alone", "of the exact curve's time"]
    return Table(title="curves from 1 % of the rows, over 20 sizes", columns=columns, rows=rows)


_NOTE: Final = (
    "Curves beside stores: of rows once a batch, by the stores' own counters, from the largest batch "
    "on. Curves of samples: every lookup an access. Points off: of the hit rate; of samples mean "
    "over 20 sizes from 0.1 % of the rows to all, "
    "and over seeds that choose other rows; by hash alone: as SHARDS with its correction. Times are of the processor."
)

PART: Final = Part(_measure, _tell)
