"""Does a DLRM on real data learn as much with 5 % of its tables in memory, and end in the same bits?

Trains examples/criteo.toml on 64,000 rows of Criteo and tests on the next 16,000, once with DDR for 5 % of the tables'
bytes, once with everything in memory, and in other ways that must not change a bit.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .child import in_child
from .common import Goal, Report, Run, Table, fresh_folder, start

Summary = dict[str, Any]
_COLUMNS = ["run", "DDR", "DDR hits", "SSD read", "samples/s", "memory for tables", "test AUC", "log loss", "bits"]


def train_run(run_file: str, store: Path, overrides: Sequence[str]) -> Summary:
    from tierstore.train import train

    from .runs import run_config

    found = train(run_config(run_file, store, *overrides), bits=True).to_dict()
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
    config = request.config
    summaries: dict[str, list[Summary]] = {each["name"]: [] for each in config["runs"]}
    for _ in range(config["repetitions"]):
        for each in config["runs"]:
            # In a fresh process: peak memory is a process's, and nothing is left over from another run.
            with fresh_folder(request.folder / "training-store") as store:
                found = in_child(train_run, config["run_file"], store, [*config["set"], *each["set"]])
            summaries[each["name"]].append(found)
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
    goals = [
        Goal("test AUC", round(first["test"]["auc"], 4), at_least=config["auc"]),
        Goal("different ends, over all runs and repetitions", len(ends), exactly=1),
    ]
    note = (
        f"Tested on the {first['test']['rows']:,} rows that follow in time; logistic regression reaches an AUC of "
        f"0.764 there. {config['repetitions']} repetitions in turns, each in a process of its own. Bits: digest of "
        "all rows of all tables and the dense weights after training."
    )
    title = f"{config['run_file']}: {first['rows']:,} rows trained, one epoch"
    return Report([Table(title, _COLUMNS, rows)], goals, [note], figures)


if __name__ == "__main__":
    start("criteo")
