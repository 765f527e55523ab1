"""Part "ranks": steps and seconds to a fixed loss of Criteo's validation rows, on 1, 2 and 4 ranks.

Rates are those that part "sets" found for the batch; the loss is the larger of those that the two optimizers reached
there, and a little more.
"""

import math
import os
import statistics
from pathlib import Path
from typing import Any, Final

from ..common import Part, Report, Run, Table
from ..sharded.ranks import run_ranks
from .training import Point, config_of, points

__all__ = ["PART"]

_NAMES: Final = {"adam": "Adam", "hessian-free": "Hessian-free"}
_MORE: Final = 1.003


def _in_rank(config: dict[str, Any], optimizer: str, best: Any, goal: float, seed: int, folder: Path) -> dict[str, Any]:
    given = (f"train.seed={seed}", f"train.batch_size={config['ranks_batch']}")
    own = config_of(config, "criteo", folder, "ranks", optimizer, best["rates"], *given)

    def goes_on(found: list[Point]) -> bool:
        return not found[-1].validation.log_loss <= goal

    found = points(own, epochs=config["ranks_epochs"], every=config["ranks_every"], goes_on=goes_on)
    losses = [each.validation.log_loss for each in found]
    return {"steps": found[-1].step, "seconds": found[-1].seconds, "reached": losses[-1] <= goal, "log_losses": losses}


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    if "sets" not in figures:
        raise SystemExit('Part "ranks" trains by the rates that part "sets" finds: measure that one first.')
    config, folder = request.config, request.folder / "generalise"
    cells = [
        each for each in figures["sets"]["cells"] if (each["set"], each["batch"]) == ("criteo", config["ranks_batch"])
    ]
    best = {each["optimizer"]: each for each in cells if each["optimizer"] in _NAMES}
    goal = _MORE * max(each["log_loss"] for each in best.values())
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {str(size): [] for size in config["ranks"]} for name in _NAMES
    }
    for seed in config["ranks_seeds"]:
        for size in config["ranks"]:
            for optimizer, own in found.items():
                of_ranks = run_ranks(_in_rank, size, config, optimizer, best[optimizer], goal, seed, folder)
                slowest = max(each["seconds"] for each in of_ranks)
                own[str(size)].append(of_ranks[0] | {"seconds": slowest})
                print(optimizer, size, own[str(size)][-1], flush=True)
    return {"optimizers": found, "log_loss": goal, "batch": config["ranks_batch"]}


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] if run["reached"] else math.inf for run in runs)


def _tell(figures: dict[str, Any]) -> Report:
    rows = []
    for optimizer, shown in _NAMES.items():
        first: float | None = None
        for size, runs in figures["optimizers"][optimizer].items():
            each = statistics.median(run["seconds"] / run["steps"] for run in runs)
            first = first or each
            cells = [f"{_median(runs, 'steps'):,.0f}", f"{_median(runs, 'seconds'):.2f}", f"{1e3 * each:.0f}"]
            rows.append([shown, size, *cells, f"{first / each:.2f}"])
    columns = ["dense optimizer", "ranks", "steps", "seconds", "ms a step", "speed over one rank's"]
    title = (
        f"Criteo: to a validation loss of {figures['log_loss']:.4f}, in batches of {figures['batch']:,} rows of all "
        "ranks together; medians over seeds"
    )
    cores = len(os.sched_getaffinity(0))
    note = f"Ranks: one thread each, on {cores} cores; four share two. Evaluation is not in the seconds."
    return Report([Table(title, columns, rows)], notes=[note])


PART: Final = Part(_measure, _tell)
