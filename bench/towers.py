"""Do towers keep a model's AUC?

Trains examples/criteo.toml with dot interaction and with DCN-v2: as it is, with four towers that give a quarter of the
bytes, their columns grouped by the similarity of the vectors that the first training left, and with columns at random.
In one process: over hosts, towers compute the same.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tierstore.train import train
from tierstore.train.config import RunConfig, load, parse_override
from tierstore.train.partition import partition_run

from .common import Goal, Report, Run, Table, program
from .data import ROOT, require_criteo

__all__ = ["run"]

_INTERACTIONS: Final = {"dot": "DLRM", "dcn": "DCN-v2"}
_FLAT, _SIMILAR, _RANDOM = _KINDS = ("without towers", "towers by similarity", "towers at random")
Found = dict[str, dict[str, list[float]]]
"""Of a kind: AUC and log loss of each seed."""


def _config(request: Run, store: Path, seed: int, *overrides: str) -> RunConfig:
    given = [f'data.path="{require_criteo()}"', f'store.path="{store}"', f"train.seed={seed}", *request.config["set"]]
    return load(ROOT / request.config["run_file"], [parse_override(text) for text in [*given, *overrides]])


def _train(config: RunConfig, found: dict[str, list[float]]) -> None:
    shutil.rmtree(config.store.path, ignore_errors=True)
    test = train(config).test
    if test is None:
        raise ValueError("the run file has no test rows to evaluate on")
    found["auc"].append(test.auc)
    found["log_loss"].append(test.log_loss)


def _towers(towers: Sequence[Sequence[str]]) -> str:
    return f"model.towers={json.dumps(towers)}"


def _measure(request: Run, interaction: str) -> Found:
    store, count, kind = request.folder / "towers-store", request.config["towers"], f'model.interaction="{interaction}"'
    found: Found = {name: {"auc": [], "log_loss": []} for name in _KINDS}
    for seed in request.config["seeds"]:
        flat = _config(request, store, seed, kind)
        _train(flat, found[_FLAT])
        similar = partition_run(flat, count, seed=seed).towers
        columns = np.random.default_rng(seed).permutation(flat.data.sparse_columns)
        drawn = [each.tolist() for each in np.array_split(columns, count)]
        _train(_config(request, store, seed, kind, _towers(similar)), found[_SIMILAR])
        _train(_config(request, store, seed, kind, _towers(drawn)), found[_RANDOM])
    shutil.rmtree(store)
    return found


def run(request: Run) -> Report:
    found = {name: _measure(request, kind) for kind, name in _INTERACTIONS.items()}
    rows, goals = [], []
    for model, kinds in found.items():
        flat = kinds[_FLAT]["auc"]
        mean, deviation = statistics.mean(flat), statistics.stdev(flat)
        for kind, figures in kinds.items():
            auc, loss = statistics.mean(figures["auc"]), statistics.mean(figures["log_loss"])
            spread = f"{statistics.stdev(figures['auc']):.5f}"
            rows.append([model, kind, f"{auc:.5f}", spread, f"{(mean - auc) / deviation:+.2f}", f"{loss:.5f}"])
        lost = (mean - statistics.mean(kinds[_SIMILAR]["auc"])) / deviation
        goals.append(
            Goal(name=f"AUC that {model} loses by towers, standard deviations", value=round(lost, 2), at_most=1)
        )
    seeds = len(request.config["seeds"])
    columns = ["model", "columns", "test AUC", "standard deviation", "lost, standard deviations", "log loss"]
    title = f"{request.config['run_file']}, {request.config['towers']} towers of compression 4: means of {seeds} seeds"
    return Report(
        question="Do towers keep a model's AUC?",
        tables=[Table(title=title, columns=columns, rows=rows)],
        figures=found,
        goals=goals,
        notes=[
            "Standard deviations of the trainings without towers. One process; over hosts, towers compute the same."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("towers", run))
