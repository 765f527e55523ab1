"""Does a training run that is killed at any instant lose a row?

A small model trains on two tables that do not fit in their memory budget: batches prefetched, commits and anchors in
the background, old versions kept, gone back to and pruned. The process is killed with SIGKILL at random instants and at
each named point of its write-back, commits and recovery. Each time the store is opened and every row, optimizer state
and dense tensor of every kept version is compared with a run that nobody kills, all rows in memory; then the next
process goes on from there. After a fifth of the kills the machine seems to have started again.
"""

import shutil
from pathlib import Path
from tempfile import mkdtemp

from tierstore.system.killpoints import POINTS

from .common import Goal, Report, Run, Table, start
from .crash.runs import kill_runs

__all__ = ["run"]


def run(request: Run) -> Report:
    config = request.config
    folder = Path(mkdtemp(prefix="crashes-", dir=request.folder))
    kills = [len(range(worker, config["kills"], config["workers"])) for worker in range(config["workers"])]
    settings = {name: config[name] for name in ("rounds", "commits", "seed")}
    tally, seconds = kill_runs(folder, kills=kills, **settings)
    for failure in tally.failures:
        print(failure)
    if not tally.failures:
        shutil.rmtree(folder)
    counts = {
        "kills at random instants": tally.random_kills,
        "kills at named points": tally.point_kills,
        "of all kills followed by a start of the machine": tally.reboots,
        **{f"random kills while {work}": count for work, count in sorted(tally.struck.items())},
        "reopened at a commit": tally.reopened,
        "versions compared": tally.versions,
        "rows that differ": tally.rows_differ,
        "runs that came to their end": tally.ended,
        "final bits that differ": tally.final_bits_differ,
    }
    points = [[name, f"{tally.points[name]:,}", f"{tally.reached[name]:,}"] for name in POINTS]
    return Report(
        [
            Table.of_counts("a training run killed, taken up and killed again", counts),
            Table("kills at named points, and how often whole runs pass them", ["point", "kills", "passed"], points),
        ],
        [
            Goal("random kills", tally.random_kills, exactly=config["kills"]),
            Goal("kills after which the store reopened at a commit", tally.reopened, exactly=tally.kills),
            Goal("rows that differ", tally.rows_differ, exactly=0),
            Goal("final bits that differ", tally.final_bits_differ, exactly=0),
            Goal("named points killed at", len(tally.points), exactly=len(POINTS)),
            Goal("failures", len(tally.failures), exactly=0),
        ],
        [
            "Compared with a run that nobody kills, all rows in memory, each commit waited for. A commit counts as "
            "durable from the moment its future says so: a store that showed an older one would be a failure, and so "
            "would one that showed anything but a commit, a process that failed, or one that hung.",
            f"A run that is not killed takes {seconds['whole']:.2f} s, its opening "
            f"{1e3 * seconds['opening']:.0f} ms of it, a commit {1e3 * seconds['commit']:.0f} ms.",
        ],
        vars(tally) | {"seconds": seconds},
    )


if __name__ == "__main__":
    start("crashes")
