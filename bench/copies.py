"""Does a store stay whole while processes copy its files from inside, follow it, and are killed?

A writer and followers share a store whose rows do not fit in their memory budget. Each copies the store's directory
now and then, as ``shutil.copytree`` does, which closes descriptors of all its files. Most run as number 1 of a PID
namespace of their own, as in containers. At a random time the writer is killed with SIGKILL, and the next one goes on;
a follower stays, or is killed too. After a quarter of the kills the machine seems to have lost its power: any sectors
of what was written after the last commit are there, and the others are not. Each version's payload says which rows it
has, and every process compares.
"""

import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

from .common import Goal, Report, Run, Table, program
from .crash.hosts import share_runs
from .crash.sharing import Tally

__all__ = ["run"]


def run(request: Run) -> Report:
    config = request.config
    stores = config["stores"]
    folder = Path(mkdtemp(prefix="copies-", dir=request.folder))
    rounds = [len(range(store, config["rounds"], stores)) for store in range(stores)]
    tally = share_runs(folder, rounds=rounds, seed=config["seed"])
    for failure in tally.failures:
        print(failure)
    if not tally.failures:
        shutil.rmtree(folder)
    return _report(config["rounds"], tally)


def _report(rounds: int, tally: Tally) -> Report:
    return Report(
        question="Does a store stay whole while processes copy its files from inside, follow it, and are killed?",
        tables=[_counts(tally)],
        figures=vars(tally),
        goals=[
            Goal(name="rounds", value=tally.rounds, exactly=rounds),
            Goal(name="commits lost", value=tally.lost, exactly=0),
            Goal(name="rows that differ", value=tally.rows_differ, exactly=0),
            Goal(name="false errors", value=tally.false_errors, exactly=0),
            Goal(name="failures", value=len(tally.failures), exactly=0),
            Goal(name="copies made from inside", value=tally.copies_by_writers + tally.copies_by_readers, at_least=1),
            Goal(name="processes in PID namespaces of their own", value=tally.namespaces, at_least=1),
            Goal(name="power losses", value=tally.power_losses, at_least=1),
        ],
        notes=[
            "A round is the life of a writer, from its open to its SIGKILL. A loss is a commit that had returned and "
            "that the next writer did not find; a false error is any error of any process, as the store was sound "
            "throughout.",
        ],
    )


def _counts(tally: Tally) -> Table:
    rows = {
        "writers killed": tally.writers_killed,
        "of them while they opened the store": tally.killed_while_opening,
        "readers killed or ended": tally.followers_killed,
        "processes in PID namespaces of their own": tally.namespaces,
        "copies made by a writer": tally.copies_by_writers,
        "copies made by readers": tally.copies_by_readers,
        "power losses": tally.power_losses,
        "restarts of the machine that lost nothing": tally.restarts,
        "commits": tally.commits,
        "moves of followers to a newer version": tally.refreshes,
        "rows that readers compared": tally.rows_read,
        "commits lost": tally.lost,
        "rows that differ": tally.rows_differ,
        "false errors": tally.false_errors,
    }
    return Table.of_counts("processes that share a store, copy it, and are killed", rows)


if __name__ == "__main__":
    sys.exit(program("copies", run))
