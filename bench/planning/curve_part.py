"""Part "curves": are miss-ratio curves those of stores?"""

import dataclasses
import itertools
from typing import Any, Final, NamedTuple

import numpy as np

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .beside_stores import POLICIES as STORE_POLICIES
from .beside_stores import errors_of, traces

__all__ = ["PART"]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    stores = []
    for workload in traces(config):
        for policy, depth in itertools.product(STORE_POLICIES, config["store_depths"]):
            found = errors_of(workload, policy, depth, config["store_sizes"])
            print(f"  {workload.name}, {policy}, {depth} ahead: {found.worst:.2f} points off a store", flush=True)
            stores.append(dataclasses.asdict(found))
    return {"stores": stores}


def _tell(figures: dict[str, Any]) -> Told:
    goals = []
    for name, (mean, worst) in _off_stores(figures).items():
        goals += [
            Goal(name=f"{name}: points that exact curves are off stores, on average", value=mean, at_most=0.5),
            Goal(name=f"{name}: points that exact curves are off stores, at worst", value=worst, at_most=2),
        ]
    return Told(tables=[_store_table(figures)], goals=goals, notes=[_NOTE])


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


_NOTE: Final = (
    "Curves beside stores: of rows once a batch, by the stores' own counters, from the largest batch on. Points off: "
    "of the hit rate."
)

PART: Final = Part(_measure, _tell)
