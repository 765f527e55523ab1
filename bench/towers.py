"""Do towers keep a model's AUC?

Trains examples/criteo.toml with dot interaction and with DCN-v2: as it is, with four towers that give a quarter of the
bytes, their columns grouped by the similarity of the vectors that the first training left, and with columns at random.
In one process: over hosts, towers compute the same.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tierstore.train.build import partition_run
from tierstore.train.config import RunConfig

from .common import Goal, Report, Run, Table, fresh_folder, start
from .runs import run_config, trained

_INTERACTIONS: Final = {"dot": "DLRM", "dcn": "DCN-v2"}
_FLAT, _SIMILAR, _RANDOM = _KINDS = ("without towers", "towers by similarity", "towers at random")
Found = dict[str, dict[str, list[float]]]
"""Of a kind: AUC and log loss of each seed."""


def _measure(request: Run, interaction: str, store: Path) -> Found:
    config = request.config
    found: Found = {name: {"auc": [], "log_loss": []} for name in _KINDS}

    def train(kind: str, seed: int, towers: Sequence[Sequence[str]] = ()) -> RunConfig:
        own = [f"model.towers={json.dumps(towers)}"] if towers else []
        given = (f"train.seed={seed}", *config["set"], f'model.interaction="{interaction}"', *own)
        made = run_config(config["run_file"], store, *given)
        test = trained(made)
        found[kind]["auc"].append(test.auc)
        found[kind]["log_loss"].append(test.log_loss)
        return made

    for seed in config["seeds"]:
        flat = train(_FLAT, seed)
        train(_SIMILAR, seed, partition_run(flat, config["towers"], seed=seed))
        columns = np.random.default_rng(seed).permutation(flat.data.sparse_columns)
        train(_RANDOM, seed, [each.tolist() for each in np.array_split(columns, config["towers"])])
    return found


def run(request: Run) -> Report:
    with fresh_folder(request.folder / "towers-store") as store:
        found = {name: _measure(request, kind, store) for kind, name in _INTERACTIONS.items()}
    rows, goals = [], []
    for model, kinds in found.items():
        flat = kinds[_FLAT]["auc"]
        mean, deviation = statistics.mean(flat), statistics.stdev(flat)
        for kind, figures in kinds.items():
            auc, loss = statistics.mean(figures["auc"]), statistics.mean(figures["log_loss"])
            spread = f"{statistics.stdev(figures['auc']):.5f}"
            rows.append([model, kind, f"{auc:.5f}", spread, f"{(mean - auc) / deviation:+.2f}", f"{loss:.5f}"])
        lost = round((mean - statistics.mean(kinds[_SIMILAR]["auc"])) / deviation, 2)
        goals.append(Goal(f"AUC that {model} loses by towers, standard deviations", lost, at_most=1))
    seeds = len(request.config["seeds"])
    columns = ["model", "columns", "test AUC", "standard deviation", "lost, standard deviations", "log loss"]
    title = f"{request.config['run_file']}, {request.config['towers']} towers of compression 4: means of {seeds} seeds"
    note = "Standard deviations of the trainings without towers. One process; over hosts, towers compute the same."
    return Report([Table(title, columns, rows)], goals, [note], found)


if __name__ == "__main__":
    start("towers")
