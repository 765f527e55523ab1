"""Does a call that is cut short at any instant leave a wrong row?

Lookups, updates, prefetches and commits are cut short by what a signal's handler raises, by MemoryError and by OSError,
each at a drawn instant, over all tiers; the device tier runs its kernels' twins on the CPU. After each, every row must
be as it was before the call or as the call leaves it, no slot may stay pinned, and bookkeeping must be whole. From time
to time the store is closed and opened again, and every row must be that of its version.
"""

import logging
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from .common import Goal, Report, Run, Table, fresh_folder, start
from .cut.life import TIERS, Found, live

__all__ = ["run"]

_CUTS_A_RUN = 200
_SEEDS_A_RUN = 100


def work(folder: Path, cuts: int, seed: int) -> Found:
    logging.getLogger("tierstore").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    return live(folder, cuts=cuts, seed=seed)


def run(request: Run) -> Report:
    config, found, begun = request.config, Found(), time.perf_counter()
    with (
        fresh_folder(request.folder / "cuts") as folder,
        ProcessPoolExecutor(config["workers"], get_context("spawn")) as pool,
    ):
        runs = [
            pool.submit(work, folder / f"{number}", _CUTS_A_RUN, config["seed"] + number * _SEEDS_A_RUN)
            for number in range(-(-config["cuts"] // _CUTS_A_RUN))
        ]
        for each in as_completed(runs):
            found.add(each.result())
            request.save(_report(config["cuts"], found, time.perf_counter() - begun))
    for failure in found.failures:
        print(failure)
    return _report(config["cuts"], found, time.perf_counter() - begun)


def _report(cuts: int, found: Found, seconds: float) -> Report:
    counts = {
        **{f"cut short by {kind}": count for kind, count in sorted(found.cuts.items())},
        **{f"cut short in: {call}": count for call, count in sorted(found.tried.items())},
        "calls that raised": found.raised,
        "stores opened again, and compared": found.reopened,
        "stores that asked for it": found.stopped,
        "wrong rows": found.wrong_rows,
        "slots that stayed pinned, or bookkeeping that was not whole": found.pinned,
    }
    goals = [
        Goal("calls cut short", found.cuts.total(), at_least=cuts),
        Goal("wrong rows, then and after reopening", found.wrong_rows, exactly=0),
        Goal("slots that stayed pinned, or bookkeeping not whole", found.pinned, exactly=0),
        Goal("failures", len(found.failures), exactly=0),
    ]
    note = (
        "An instant is a call, the start of a function or a jump backwards in the package's code, in the main "
        "thread or in those of commits and prefetching. Rows are compared with a tensor of the values that they "
        "may have."
    )
    table = Table.of_counts(f"calls cut short over {len(TIERS)} combinations of tiers", counts)
    return Report([table], goals, [note], counts | {"seconds": seconds})


if __name__ == "__main__":
    start("cuts")
