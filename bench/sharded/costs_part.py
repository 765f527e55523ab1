"""Part "errors": costs of ranks, and how far they are off on sets of tables that they were not fitted to."""

from dataclasses import asdict
from typing import Any, Final

from tierstore.dist.placement import RankCosts
from tierstore.dist.placement.costs import KINDS
from tierstore.dist.placement.measure import measure_ranks
from tierstore.settings.sections import described

from ..common import Goal, Part, Report, Run, Table
from .ranks import run_ranks

__all__ = ["PART", "costs_of"]


def costs_of(figures: dict[str, Any]) -> dict[int, RankCosts]:
    """By the number of ranks, as the part "errors" found them."""
    if "errors" not in figures:
        raise SystemExit("This part needs the costs of --only errors, or the file of --json that has them.")
    found = (described(RankCosts, each, "costs") for each in figures["errors"]["costs"])
    return {costs.world_size: costs for costs in found}


def _in_rank(seconds: float) -> RankCosts:
    return measure_ranks(seconds=seconds)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    sizes = request.config["ranks"]
    return {"costs": [asdict(run_ranks(_in_rank, size, request.config["measure_s"])[0]) for size in sizes]}


def _tell(figures: dict[str, Any]) -> Report:
    pairs = [(costs, kind, costs["errors"][kind]) for costs in figures["costs"] for kind in KINDS]
    goals = [
        Goal(f"error of the costs, {costs['world_size']} ranks, {kind}", round(error, 3), at_most=0.15)
        for costs, kind, error in pairs
    ]
    title = "mean error of what is predicted of a step, sets of tables that were not fitted"
    rows = [[str(costs["world_size"]), kind, f"{error:.1%}"] for costs, kind, error in pairs]
    note = "; ".join(costs["source"].partition("measure, ")[2] for costs in figures["costs"])
    return Report(
        [Table(title, ["ranks", "exchange", "error"], rows)], goals, [f"Costs: {note}; each fifth set is held out."]
    )


PART: Final = Part(_measure, _tell)
