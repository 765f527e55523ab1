"""Training runs as benchmarks: the same run file under several overrides, each in a process of its own."""

import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .common import Goal, Spread, Table

__all__ = ["Outcome", "equal_bits", "outcome_table", "placeless", "run_all"]


class Outcome(NamedTuple):
    """What repetitions of one run came to."""

    name: str
    summary: dict[str, Any]
    """``tierstore.train.Summary.to_dict()`` of the last repetition, without its store's folder and its history."""
    samples_per_s: Spread
    bits: frozenset[str]
    """Digests of all rows and dense weights, one for each different end."""


def _train(run_file: str, overrides: Sequence[str]) -> dict[str, Any]:
    from tierstore.train import train
    from tierstore.train.config import load, parse_override

    return train(load(run_file, [parse_override(text) for text in overrides]), bits=True).to_dict()


def _train_apart(run_file: Path, overrides: Sequence[str], store: Path) -> dict[str, Any]:
    """In a fresh process: peak memory is a process's, and nothing is left over from another run."""
    shutil.rmtree(store, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(_train, str(run_file), [*overrides, f'store.path="{store}"']).result()
        finally:
            shutil.rmtree(store, ignore_errors=True)


def placeless(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's summary without the folder of its store, which is of this machine alone, and without its history."""
    return {name: value for name, value in summary.items() if name not in ("store", "history")}


def run_all(
    run_file: Path, runs: Sequence[dict[str, Any]], common: Sequence[str], folder: Path, repetitions: int
) -> list[Outcome]:
    """Every run (``name``, ``set``: overrides of the run file) that many times, taking turns."""
    summaries: dict[str, list[dict[str, Any]]] = {run["name"]: [] for run in runs}
    for _ in range(repetitions):
        for run in runs:
            found = _train_apart(run_file, [*common, *run["set"]], folder / "training-store")
            summaries[run["name"]].append(found)
    return [
        Outcome(
            name,
            placeless(each[-1]),
            Spread.of([summary["samples_per_second"] for summary in each]),
            frozenset(summary["bits"] for summary in each),
        )
        for name, each in summaries.items()
    ]


def outcome_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    return Table(
        title=title,
        columns=[
            "run",
            "DDR",
            "DDR hits",
            "SSD read",
            "samples/s",
            "memory for tables",
            "test AUC",
            "log loss",
            "bits",
        ],
        rows=[_row(each) for each in outcomes],
    )


def _row(outcome: Outcome) -> list[str]:
    summary, tiers, test = outcome.summary, outcome.summary["tiers"], outcome.summary["test"]
    grown_bytes = summary["end_bytes"] - summary["start_bytes"]
    return [
        outcome.name,
        f"{tiers['ddr']['bytes'] / 2**20:.1f} MiB",
        f"{tiers['ddr']['hit_rate']:.1%}",
        f"{tiers['ssd']['bytes_read'] / 2**20:.0f} MiB",
        f"{outcome.samples_per_s.median:,.0f}",
        f"{grown_bytes / 2**20:.0f} MiB",
        f"{test['auc']:.4f}",
        f"{test['log_loss']:.4f}",
        ", ".join(sorted(bits[:12] for bits in outcome.bits)),
    ]


def equal_bits(outcomes: Sequence[Outcome]) -> Goal:
    """All runs, all repetitions."""
    ends = frozenset().union(*(each.bits for each in outcomes))
    return Goal(name="different ends, over all runs and repetitions", value=len(ends), exactly=1)
