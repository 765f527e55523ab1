"""Part "measured": plans of drawn sets of tables, by the beam search and by greedy rules, on real ranks."""

import statistics
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

import tierstore
from tierstore.dist.placement import RankCosts
from tierstore.dist.placement.baselines import RULES
from tierstore.plan.traces import draw_zipf

from ..common import Goal, Part, Run, Table, Told
from .costs_part import costs_of
from .plans_part import Case, demand_in, take_plans
from .ranks import run_ranks
from .sets_part import BEAM, rank_limit, searched, tables_asked
from .turns import spreads

__all__ = ["PART"]


def _case(config: dict[str, Any], number: int, count: int, size: int) -> Case:
    """Tables as those of the simulated plans with fewer rows, and ids by Zipf's law."""
    generator = np.random.default_rng((config["seed"], number))
    every, asked = tables_asked(config)
    chosen = [
        replace(table, num_embeddings=max(16, int(table.num_embeddings * config["measured_rows"])))
        for table in (every[place] for place in generator.choice(len(every), count, replace=False))
    ]
    low, high = config["measured_exponents"]
    exponents = generator.uniform(low, high, count)
    samples, batches = config["measured_batch"], config["batches"]

    def batch() -> tierstore.KeyedJaggedTensor:
        lengths = [generator.poisson(asked[table.name][0], samples) for table in chosen]
        ids = [
            draw_zipf(table.num_embeddings, exponent, int(own.sum()), seed=int(generator.integers(1 << 31)))
            for table, exponent, own in zip(chosen, exponents, lengths, strict=True)
        ]
        names = [table.name for table in chosen]
        return tierstore.KeyedJaggedTensor(
            names, torch.from_numpy(np.concatenate(ids)), lengths=torch.from_numpy(np.concatenate(lengths))
        )

    return Case(f"set {number}", chosen, [[batch() for _ in range(batches)] for _ in range(size)])


def _in_rank(config: dict[str, Any], costs: RankCosts) -> list[dict[str, Any]]:
    found, size = [], costs.world_size
    for number, count in enumerate(config["set_tables"] * config["measured_sets"]):
        case = _case(config, number, count, size)
        demand, limit = demand_in(case), rank_limit(config, case.tables, size)
        searches = searched(case.tables, demand, costs, limit, number)
        plans = {rule: own.plan for rule, own in searches.items() if own is not None}
        taken = take_plans(case, plans, demand, costs, config["measured_turns"])
        found.append({"tables": count, "plans": taken})
    return found


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    costs, points = costs_of(figures), []
    size = max(costs)
    for of_set in zip(*run_ranks(_in_rank, size, request.config, costs[size]), strict=True):
        step = spreads([{name: each["seconds"] for name, each in rank["plans"].items()} for rank in of_set])
        plans = {
            name: {"predicted_s": each["predicted_s"], "seconds": step[name]}
            for name, each in of_set[0]["plans"].items()
        }
        points.append({"tables": of_set[0]["tables"], "plans": plans})
    return {
        "points": points,
        "ranks": size,
        "batch": request.config["measured_batch"],
        "rows": request.config["measured_rows"],
    }


def _tell(figures: dict[str, Any]) -> Told:
    points, rows, ratios = figures["points"], [], list[float]()
    for rule in (*RULES, BEAM):
        own = [each["plans"] for each in points if rule in each["plans"] and BEAM in each["plans"]]
        taken = [plans[rule]["seconds"]["median"] for plans in own]
        over = [plans[rule]["seconds"]["median"] / plans[BEAM]["seconds"]["median"] for plans in own]
        off = [abs(plans[rule]["predicted_s"] / plans[rule]["seconds"]["median"] - 1) for plans in own]
        shown = ["", "", "", ""]
        if own:
            shown = [f"{1e3 * statistics.fmean(taken):.0f}", f"{statistics.fmean(over):.2f}"]
            shown += [f"{statistics.median(off):.0%}", f"{max(off):.0%}"]
        rows.append([rule, f"{len(own) / len(points):.0%}", *shown])
        if rule != BEAM and own:
            ratios.append(statistics.fmean(over))
    title = f"plans of {len(points)} sets of 20 to 100 tables, measured on {figures['ranks']} ranks"
    columns = ["search", "valid", "mean ms", "over the beam's of the same sets", "off by prediction, median", "worst"]
    goal = Goal(
        name=f"time of a step by the best greedy rule over the beam's, {figures['ranks']} real ranks",
        value=round(min(ratios, default=1), 3), at_least=1.0,
    )  # fmt: skip
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], goals=[goal], notes=[_note(figures)])


def _note(figures: dict[str, Any]) -> str:
    return (
        f"Measured sets: tables drawn as for the simulated plans, with {figures['rows']:.0%} of the rows; "
        f"{figures['batch']} samples a rank, ids by Zipf's law with an exponent drawn for each table, row-wise "
        "Adagrad, all rows in memory, no prefetch. Ranks share cores, and so did those that gave the costs."
    )


PART: Final = Part(_measure, _tell)
