"""Does a DLRM on real data learn as much with 5 % of its tables in memory, and end in the same bits?

Trains examples/criteo.toml on 64,000 rows of Criteo and tests on the next 16,000, once with DDR for 5 % of the tables'
bytes, once with everything in memory, and in other ways that must not change a bit.
"""

import multiprocessing
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .common import Goal, Report, Run, Table, program
from .data import ROOT, require_criteo

__all__ = ["run"]

Summary = dict[str, Any]
_COLUMNS = ["run", "DDR", "DDR hits", "SSD read", "samples/s", "memory for tables", "test AUC", "log loss", "bits"]


def _train(run_file: str, overrides: Sequence[str]) -> Summary:
    from tierstore.train import train
    from tierstore.train.config import load, parse_override

    return train(load(run_file, [parse_override(text) for text in overrides]), bits=True).to_dict()


def _train_apart(run_file: Path, overrides: Sequence[str], store: Path) -> Summary:
    """In a fresh process: peak memory is a process's, and nothing is left over from another run."""
    shutil.rmtree(store, ignore_errors=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            found = process.submit(_train, str(run_file), [*overrides, f'store.path="{store}"']).result()
        finally:
            shutil.rmtree(store, ignore_errors=True)
    # The folder is of this machine alone.
    return {name: value for name, value in found.items() if name not in ("store", "history")}


def _row(name: str, each: Summary, samples_per_s: float, bits: Sequence[str]) -> list[str]:
    tiers, test = each["tiers"], each["test"]
    return [
        name, f"{tiers['ddr']['bytes'] / 2**20:.1f} MiB", f"{tiers['ddr']['hit_rate']:.1%}",
        f"{tiers['ssd']['bytes_read'] / 2**20:.0f} MiB", f"{samples_per_s:,.0f}",
        f"{(each['end_bytes'] - each['start_bytes']) / 2**20:.0f} MiB", f"{test['auc']:.4f}",
        f"{test['log_loss']:.4f}", ", ".join(each[:12] for each in bits),
    ]  # fmt: skip


def run(request: Run) -> Report:
    config, run_file, store = request.config, ROOT / request.config["run_file"], request.folder / "training-store"
    common = [f'data.path="{require_criteo()}"', *config["set"]]
    summaries: dict[str, list[Summary]] = {each["name"]: [] for each in config["runs"]}
    for _ in range(config["repetitions"]):
        for each in config["runs"]:
            summaries[each["name"]].append(_train_apart(run_file, [*common, *each["set"]], store))
    figures = {
        name: {
            "summary": own[-1],
            "samples_per_s": statistics.median(each["samples_per_second"] for each in own),
            "bits": sorted({each["bits"] for each in own}),
        }
        for name, own in summaries.items()
    }
    first, ends = next(iter(summaries.values()))[-1], {end for each in figures.values() for end in each["bits"]}
    rows = [_row(name, each["summary"], each["samples_per_s"], each["bits"]) for name, each in figures.items()]
    return Report(
        question="Does a DLRM on real data learn as much with 5 % of its tables in memory, and end in the same bits?",
        tables=[
            Table(title=f"{config['run_file']}: {first['rows']:,} rows trained, one epoch", columns=_COLUMNS, rows=rows)
        ],
        figures=figures,
        goals=[
            Goal(name="test AUC", value=round(first["test"]["auc"], 4), at_least=config["auc"]),
            Goal(name="different ends, over all runs and repetitions", value=len(ends), exactly=1),
        ],
        notes=[
            f"Tested on the {first['test']['rows']:,} rows that follow in time; logistic regression reaches an AUC of "
            f"0.764 there. {config['repetitions']} repetitions in turns, each in a process of its own. Bits: digest of "
            "all rows of all tables and the dense weights after training."
        ],
    )


if __name__ == "__main__":
    # By its name, so that a child finds what it is to run.
    from bench import criteo

    sys.exit(program("criteo", criteo.run))
