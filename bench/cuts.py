"""Does a call that is cut short at any instant leave a wrong row?

Lookups, updates, prefetches and commits are cut short by what a signal's handler raises, by MemoryError and by OSError,
each at a drawn instant, over all tiers; the device tier runs its kernels' twins on the CPU. After each, every row must
be as it was before the call or as the call leaves it, no slot may stay pinned, and bookkeeping must be whole. From time
to time the store is closed and opened again, and every row must be that of its version.

Commits, changes of tables, rollbacks, backups and reshards are cut short at named steps, too: ``bench/cut/steps.py``.
"""

import logging
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from .common import Goal, Report, Run, Table, fresh_folder, start
from .cut import steps
from .cut.life import TIERS, Found, live

__all__ = ["run"]

_CUTS_A_RUN = 200
_STEPS_A_RUN = 60
_SEEDS_A_RUN = 100


def work(folder: Path, cuts: int, seed: int, *, at_steps: bool) -> Found:
    logging.getLogger("tierstore").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return (steps.live if at_steps else live)(folder, cuts=cuts, seed=seed)


def run(request: Run) -> Report:
    config, begun = request.config, time.perf_counter()
    found = {False: Found(), True: Found()}  # by whether calls were cut short at steps
    with (
        fresh_folder(request.folder / "cuts") as folder,
        ProcessPoolExecutor(config["workers"], get_context("spawn")) as pool,
    ):
        runs = {
            pool.submit(
                work, folder / f"{at_steps}-{number}", cuts, config["seed"] + number * _SEEDS_A_RUN, at_steps=at_steps
            ): at_steps
            for at_steps, total, cuts in ((True, config["steps"], _STEPS_A_RUN), (False, config["cuts"], _CUTS_A_RUN))
            for number in range(-(-total // cuts))
        }
        for each in as_completed(runs):
            found[runs[each]].add(each.result())
            request.save(_report(config, found, time.perf_counter() - begun))
    for failure in [failure for each in found.values() for failure in each.failures]:
        print(failure)
    return _report(config, found, time.perf_counter() - begun)


def _counts(found: Found) -> dict[str, Any]:
    return {
        **{f"cut short by {kind}": count for kind, count in sorted(found.cuts.items())},
        **{f"cut short in: {call}": count for call, count in sorted(found.tried.items())},
        "calls that raised": found.raised,
        "stores opened again, and compared": found.reopened,
        "stores that asked for it": found.stopped,
        "wrong rows": found.wrong_rows,
        "slots that stayed pinned, or bookkeeping that was not whole": found.pinned,
    }


def _report(config: dict[str, Any], found: dict[bool, Found], seconds: float) -> Report:
    both = found.values()
    goals = [
        Goal("calls cut short", found[False].cuts.total(), at_least=config["cuts"]),
        Goal("commits, changes of tables and copies cut short", found[True].cuts.total(), at_least=config["steps"]),
        Goal("wrong rows, then and after reopening", sum(each.wrong_rows for each in both), exactly=0),
        Goal("slots that stayed pinned, or bookkeeping not whole", sum(each.pinned for each in both), exactly=0),
        Goal("failures", sum(len(each.failures) for each in both), exactly=0),
    ]
    note = (
        "An instant is a call, the start of a function or a jump backwards in the package's code, in the main "
        "thread or in those of commits and prefetching. Rows are compared with a tensor of the values that they "
        "may have."
    )
    counts = {at_steps: _counts(each) for at_steps, each in found.items()}
    tables = [
        Table.of_counts(f"calls cut short over {len(TIERS)} combinations of tiers", counts[False]),
        Table.of_counts("commits, changes of tables and copies cut short between any two steps", counts[True]),
    ]
    return Report(tables, goals, [note], counts[False] | {"steps": counts[True], "seconds": seconds})


if __name__ == "__main__":
    start("cuts")
