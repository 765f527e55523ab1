"""Part "sets": plans of many tables over simulated ranks, beside greedy rules, by the measured costs."""

import statistics
import time
from dataclasses import replace
from typing import Any, Final

import numpy as np

import tierstore
from tierstore.dist.placement import Demand, Prediction, RankCosts, Search, TableDemand, greedy
from tierstore.dist.placement.baselines import RULES

from ..common import Goal, Part, Report, Run, Table
from .costs_part import costs_of

__all__ = ["BEAM", "PART", "rank_limit", "searched", "tables_asked"]

BEAM: Final = "beam"


def tables_asked(config: dict[str, Any]) -> tuple[list[tierstore.TableConfig], dict[str, tuple[float, float]]]:
    """Tables, and of each the ids of a sample and the share of a batch's ids that are distinct."""
    generator, count = np.random.default_rng(config["seed"]), config["trace_tables"]
    rule = tierstore.optim.RowWiseAdagrad()
    rows, dims = 10 ** generator.uniform(3, 6.5, count), generator.choice(config["set_dims"], count)
    factors, shares = generator.lognormal(sigma=1.5, size=count), generator.lognormal(sigma=0.7, size=count)
    factors *= config["trace_ids"] / config["trace_samples"] / factors.sum() * count / 856
    shares = np.minimum(1.0, shares * config["trace_distinct"] / config["trace_ids"])
    tables = [
        tierstore.TableConfig(name=f"t{n}", num_embeddings=int(own), embedding_dim=int(dim), optimizer=rule)
        for n, (own, dim) in enumerate(zip(rows, dims, strict=True))
    ]
    asked = zip(factors.tolist(), shares.tolist(), strict=True)
    return tables, {table.name: own for table, own in zip(tables, asked, strict=True)}


def _demand(
    tables: list[tierstore.TableConfig], asked: dict[str, tuple[float, float]], samples: int, ranks: int
) -> Demand:
    """Of ``samples`` of all ranks; a rank's distinct rows grow with the root of its samples."""
    found = {}
    for table in tables:
        factor, share = asked[table.name]
        ids, most = factor * samples, table.num_embeddings
        all_rows = min(share * ids, most)
        rows = min(all_rows / ranks**0.5, ids / ranks)
        found[table.name] = TableDemand(ids / ranks, rows, all_rows)
    return Demand(samples / ranks, found)


def rank_limit(config: dict[str, Any], tables: list[tierstore.TableConfig], ranks: int) -> float:
    sizes = [table.size_bytes(4096) for table in tables]
    return float(config["set_limit"] * max(sum(sizes) / ranks, *sizes))


def searched(
    tables: list[tierstore.TableConfig], demand: Demand, costs: RankCosts, limit: float, seed: int
) -> dict[str, Prediction | None]:
    """By each search; None where it finds no plan."""

    def tried(rule: Any) -> Prediction | None:
        try:
            if rule == BEAM:
                return Search(tables, demand, costs, rank_bytes=limit).best()
            return greedy(tables, demand, costs, rule, rank_bytes=limit, seed=seed)
        except ValueError:
            return None

    return {rule: tried(rule) for rule in (*RULES, BEAM)}


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    config, costs = request.config, costs_of(figures)
    tables, asked = tables_asked(config)
    measured, points = costs[max(costs)], list[dict[str, Any]]()
    for size in config["set_ranks"]:
        # As if each rank had a core of its own.
        own = replace(measured, world_size=size, local_world_size=size, cores=size)
        for number in [count for count in config["set_tables"] for _ in range(config["sets"])]:
            generator = np.random.default_rng((config["seed"], size, len(points)))
            chosen = [tables[place] for place in generator.choice(len(tables), number, replace=False)]
            limit = rank_limit(config, chosen, size)
            demand = _demand(chosen, asked, config["trace_samples"], size)
            found = searched(chosen, demand, own, limit, len(points))
            seconds = {rule: plan and plan.seconds for rule, plan in found.items()}
            points.append({"ranks": size, "tables": number, "seconds": seconds})
    begun = time.perf_counter()
    demand, limit = _demand(tables, asked, config["trace_samples"], size), rank_limit(config, tables, size)
    Search(tables, demand, own, rank_bytes=limit).best()
    return {"points": points, "tables": len(tables), "ranks": size, "search_s": time.perf_counter() - begun}


def _tell(figures: dict[str, Any]) -> Report:
    rows, shares = [], []
    for size in dict.fromkeys(point["ranks"] for point in figures["points"]):
        own = [point["seconds"] for point in figures["points"] if point["ranks"] == size]
        for rule in (*RULES, BEAM):
            valid = [(each[rule], each[BEAM]) for each in own if each[rule] is not None]
            costs = [mean for mean, _ in valid]
            ratio = statistics.fmean(mean / best for mean, best in valid) if valid else 0.0
            shown = [f"{1e3 * statistics.fmean(costs):,.0f}", f"{ratio:.2f}"] if valid else ["", ""]
            rows.append([str(size), rule, f"{len(valid) / len(own):.0%}", *shown])
            if rule != BEAM and valid:
                shares.append(ratio)
    columns = ["ranks", "search", "valid", "mean ms of a step", "over the beam's of the same sets"]
    found = [each["seconds"][BEAM] is not None for each in figures["points"]]
    least = round(min(shares, default=1), 3)
    name = f"seconds of the search for {figures['tables']} tables, {figures['ranks']} ranks"
    goals = [
        Goal("sets of which the beam search finds a plan", sum(found) / len(found), at_least=1.0),
        Goal("cost by the best greedy rule over the beam's", least, at_least=1.0),
        Goal(name, round(figures["search_s"], 1), at_most=30.0),
    ]
    return Report([Table("plans of 20 to 100 tables, simulated by the costs", columns, rows)], goals, [_NOTE])


_NOTE: Final = (
    "Sets are drawn from tables whose ids and distinct rows in a batch add up to those of the 856 tables of Meta's "
    "traces of 2021; how they are divided among tables, rows and columns are drawn, as no more is published. A step "
    "has 65,536 samples over all ranks, which have a core each. Greedy plans are table-wise, with the faster of both "
    "exchanges. A plan is valid if no rank's rows exceed the limit. Means are over a rule's valid plans."
)
PART: Final = Part(_measure, _tell)
