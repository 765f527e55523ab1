"""Part "ranks": steps and seconds to a fixed loss of Criteo's validation rows, on 1, 2 and 4 ranks.

Rates are those that part "sets" found for the batch; the loss is the larger of those that the two optimizers reached
there, and a little more.
"""

import math
import os
import statistics
from pathlib import Path
from typing import Any, Final

from ..common import Part, Run, Table, Told
from ..sharded.ranks import run_ranks
from .training import Point, config_of, points

__all__ = ["PART"]

_NAMES: Final = {"adam": "Adam", "hessian-free": "Hessian-free"}
_MORE: Final = 1.003


def _in_rank(
    config: dict[str, Any], optimizer: str, rates: tuple[float, float], goal: float, seed: int, folder: Path
) -> dict[str, Any]:
    given = [f'store.path="{folder / "ranks"}"', f'optimizer.dense="{optimizer}"', f"train.seed={seed}"]
    given += [f"optimizer.sparse_lr={rates[0]!r}", f"optimizer.dense_lr={rates[1]!r}"]
    own = config_of(config, "criteo", folder, *given, f"train.batch_size={config['ranks_batch']}")

    def goes_on(found: list[Point]) -> bool:
        return not found[-1].validation.log_loss <= goal

    found = points(own, epochs=config["ranks_epochs"], every=config["ranks_every"], goes_on=goes_on)
    last = found[-1]
    return {
        "steps": last.step,
        "seconds": last.seconds,
        "reached": not goes_on(found),
        "log_losses": [each.validation.log_loss for each in found],
    }


def _found(config: dict[str, Any], sets: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each optimizer, what part "sets" found for the batch."""
    own = [each for each in sets["cells"] if (each["set"], each["batch"]) == ("criteo", config["ranks_batch"])]
    return {each["optimizer"]: each for each in own if each["optimizer"] in _NAMES}


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    if "sets" not in figures:
        raise SystemExit('Part "ranks" trains by the rates that part "sets" finds: measure that one first.')
    config, folder, best = request.config, request.folder / "generalise", _found(request.config, figures["sets"])
    goal = _MORE * max(each["log_loss"] for each in best.values())
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {str(size): [] for size in config["ranks"]} for name in _NAMES
    }
    for seed in config["ranks_seeds"]:
        for size in config["ranks"]:
            for optimizer, own in found.items():
                of_ranks = run_ranks(_in_rank, size, config, optimizer, best[optimizer]["rates"], goal, seed, folder)
                slowest = max(each["seconds"] for each in of_ranks)
                own[str(size)].append(of_ranks[0] | {"seconds": slowest})
                print(optimizer, size, own[str(size)][-1], flush=True)
    return {"optimizers": found, "log_loss": goal, "batch": config["ranks_batch"]}


def _median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] if run["reached"] else math.inf for run in runs)


def _tell(figures: dict[str, Any]) -> Told:
    rows = []
    for optimizer, shown in _NAMES.items():
        sizes = figures["optimizers"][optimizer]
        first: float | None = None
        for size, runs in sizes.items():
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
    notes = [f"Ranks: one thread each, on {cores} cores; four share two. Evaluation is not in the seconds."]
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], notes=notes)


PART: Final = Part(_measure, _tell)
