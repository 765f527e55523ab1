"""Part "criteo": what the Criteo example learns in two ranks, beside one process and the noise of seeds."""

import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .torchrun import begin, summary_of

__all__ = ["PART"]

RANKS: Final = (1, 2)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, runs = request.config, []
    for seed in range(1, config["criteo_seeds"] + 1):
        for ranks in RANKS:
            with tempfile.TemporaryDirectory(dir=request.folder) as name:
                folder = Path(name) / "run"
                settings = {"train.seed": seed, "data.train_rows": config["criteo_rows"]}
                found = summary_of(folder, begin(folder, ranks, settings))
            test = {"auc": found["test"]["auc"], "log_loss": found["test"]["log_loss"]}
            runs.append({"seed": seed, "ranks": ranks, **test, "seconds": found["seconds"], "step": found["step"]})
    return {"runs": runs, "rows": config["criteo_rows"]}


def _tell(figures: dict[str, Any]) -> Told:
    runs = figures["runs"]
    by_ranks = {ranks: [each for each in runs if each["ranks"] == ranks] for ranks in RANKS}
    rows, goals = [], []
    for name, what in (("auc", "test AUC"), ("log_loss", "test log loss")):
        alone, together = ([each[name] for each in by_ranks[ranks]] for ranks in RANKS)
        apart = max(abs(one - two) for one, two in zip(alone, together, strict=True))
        figures_of = [f"{mean(alone):.5f}", f"{mean(together):.5f}", f"{stdev(alone):.1e}", f"{apart:.1e}"]
        rows.append([what, *figures_of])
        goals.append(
            Goal(
                name=f"Criteo in 2 ranks: {what}, mean off one process's, in standard deviations over seeds",
                value=round(abs(mean(together) - mean(alone)) / stdev(alone), 3),
                at_most=1.0,
            )
        )
    seconds = [f"{mean(each['seconds'] for each in by_ranks[ranks]):.1f}" for ranks in RANKS]
    rows.append(["seconds", *seconds, "", ""])
    columns = ["", "one process", "2 ranks", "deviation over seeds", "apart at most, of one seed"]
    title = f"examples/criteo.toml, {figures['rows']:,} rows, {len(by_ranks[1])} seeds"
    note = "Criteo: the same global batch of 32, 5 % of the tables in DDR in all; two ranks by torchrun, row-wise."
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)
