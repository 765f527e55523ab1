"""Does a training run that is killed at any instant lose a row?

A small model trains on two tables that do not fit in their memory budget: batches prefetched, commits and anchors in
the background, old versions kept, gone back to and pruned. The process is killed with SIGKILL at random instants and at
each named point of its write-back, commits and recovery. Each time the store is opened and every row, optimizer state
and dense tensor of every kept version is compared with the same run in plain numpy arrays; then the next process goes
on from there. After a fifth of the kills the machine seems to have started anew.

Parts, each for itself with ``--only``: "training" is that; "resharding" kills ranks that go on from another number of
ranks, and ``tierstore reshard`` (``bench/crash/resharding.py``).
"""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from tierstore.system.killpoints import COPY_POINTS, POINTS

from .common import Goal, Report, Run, Table, program
from .crash import resharding
from .crash.chain import Tally
from .crash.hosts import kill_ranks, kill_runs
from .parts import Part, Told, run_parts

__all__ = ["PARTS", "run"]


def _shares(kills: int, workers: int) -> list[int]:
    """So many kills, of each worker."""
    return [len(range(worker, kills, workers)) for worker in range(workers)]


def _close(folder: Path, failures: Sequence[str]) -> None:
    """Print the failures; stores stay where there are some."""
    for failure in failures:
        print(failure)
    if not failures:
        shutil.rmtree(folder)


def _measure_training(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    folder = Path(mkdtemp(prefix="crashes-", dir=request.folder))
    settings = {name: config[name] for name in ("rounds", "stride", "commits", "seed")}
    outcome = kill_runs(folder, kills=_shares(config["kills"], config["workers"]), **settings)
    _close(folder, outcome.tally.failures)
    return vars(outcome.tally) | {"seconds": outcome.seconds, "asked": config["kills"]}


def _tell_training(figures: dict[str, Any]) -> Told:
    tally, seconds = Tally(), figures["seconds"]
    tally.add({name: value for name, value in figures.items() if name in vars(tally)})
    return Told(
        tables=[_counts(tally), _points(tally)],
        goals=[
            Goal(name="random kills", value=tally.random_kills, exactly=figures["asked"]),
            Goal(
                name="kills after which the store reopened at a commit",
                value=tally.reopened,
                exactly=tally.kills,
            ),
            Goal(name="rows that differ", value=tally.rows_differ, exactly=0),
            Goal(name="final bits that differ", value=tally.final_bits_differ, exactly=0),
            Goal(name="named points killed at", value=len(tally.points), exactly=len(POINTS)),
            Goal(name="failures", value=len(tally.failures), exactly=0),
        ],
        notes=[
            "Compared with a twin in numpy that shares no code with the store. A commit counts as durable from the "
            "moment its future says so: a store that showed an older one would be a failure, and so would one that "
            "showed anything but a commit, a process that failed, or one that hung.",
            f"A run that is not killed takes {seconds['whole']:.2f} s, its opening "
            f"{1e3 * seconds['opening']:.0f} ms of it, a commit {1e3 * seconds['commit']:.0f} ms.",
        ],
    )


def _counts(tally: Tally) -> Table:
    rows = {
        "kills at random instants": tally.random_kills,
        "kills at named points": tally.point_kills,
        "kills while a store was made, before each call on a file": tally.call_kills,
        "of all kills followed by a start of the machine": tally.reboots,
        **{f"random kills while {work}": count for work, count in sorted(tally.struck.items())},
        "reopened at a commit": tally.reopened,
        "versions compared": tally.versions,
        "rows that differ": tally.rows_differ,
        "runs that came to their end": tally.ended,
        "final bits that differ": tally.final_bits_differ,
    }
    return Table.of_counts("a training run killed, taken up and killed again", rows)


def _points(tally: Tally) -> Table:
    return Table(
        title="kills at named points, and how often whole runs pass them",
        columns=["point", "kills", "passed"],
        rows=[[name, f"{tally.points[name]:,}", f"{tally.reached[name]:,}"] for name in POINTS],
    )


def _measure_resharding(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    folder = Path(mkdtemp(prefix="resharding-", dir=request.folder))
    shares = _shares(config["reshard_kills"], config["workers"])
    tally = kill_ranks(folder, kills=shares, seed=config["seed"])
    _close(folder, tally.failures)
    return vars(tally) | {"asked": config["reshard_kills"]}


def _tell_resharding(figures: dict[str, Any]) -> Told:
    tally = resharding.Tally()
    tally.add({name: value for name, value in figures.items() if name in vars(tally)})
    kills, reopened = sum(tally.kills.values()), Counter(tally.reopened)
    rows = {
        "kills of ranks that reshard": kills - tally.kills["tierstore reshard"],
        "of them, at drawn instants": tally.instants,
        "kills of tierstore reshard": tally.kills["tierstore reshard"],
        **{f"gone on from by {who}": count for who, count in sorted(reopened.items())},
        "sets of parts that were replaced, read": tally.replaced,
        "runs lost": tally.lost,
    }
    named = [name for name in COPY_POINTS if tally.points[name]]
    return Told(
        tables=[
            Table.of_counts("ranks killed while they go on from another number of ranks", rows),
            Table(
                title="kills of them at named points",
                columns=["point", "kills"],
                rows=[[name, f"{count:,}"] for name, count in sorted(tally.points.items())],
            ),
        ],
        goals=[
            Goal(name="kills while ranks reshard", value=kills, at_least=figures["asked"]),
            Goal(name="named points of resharding killed at", value=len(named), exactly=len(COPY_POINTS)),
            Goal(name="runs lost while ranks reshard", value=tally.lost, exactly=0),
        ],
        notes=[
            "Resharding: one to four ranks take up one store in turn; one, some or all of them are killed. The last "
            "commit must be found by as many ranks as before, by as many as were killed, by another number of them, or "
            "by one process, each row with the value that its step gave it; so must the parts that were replaced."
        ],
    )


PARTS: Final[dict[str, Part]] = {
    "training": Part(_measure_training, _tell_training),
    "resharding": Part(_measure_resharding, _tell_resharding),
}


def run(request: Run) -> Report:
    return run_parts(request, "Does a training run that is killed at any instant lose a row?", PARTS)


if __name__ == "__main__":
    sys.exit(program("crashes", run, parts=tuple(PARTS)))
