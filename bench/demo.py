"""How long does ``make demo`` take on this machine, and what do its two trainings come to?"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from .common import Goal, Report, Run, Spread, program
from .training import Outcome, equal_bits, outcome_table, placeless

__all__ = ["run"]

_RUNS = {"tiered": "DDR 10 % of what training touches", "in-memory": "everything in memory"}


_CODE = "import sys; from tierstore.train.demo import run_demo; run_demo(sys.argv[1], rows=int(sys.argv[2]))"


def _demonstrate(folder: Path, rows: int) -> float:
    """Seconds of ``tierstore demo``, start of Python included; its reports stay in the folder."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _CODE, str(folder), str(rows)], check=True, stdout=sys.stderr)
    return time.perf_counter() - start


def _outcome(folder: Path, name: str) -> Outcome:
    summary = placeless(json.loads((folder / f"{name}.json").read_text()))
    return Outcome(_RUNS[name], summary, Spread.of([summary["samples_per_second"]]), frozenset([summary["bits"]]))


def run(request: Run) -> Report:
    folder = request.folder / "demo"
    seconds, outcomes, ratios = [], [], []
    for _ in range(request.config["repetitions"]):
        seconds.append(_demonstrate(folder, request.config["rows"]))
        outcomes = [_outcome(folder, name) for name in _RUNS]
        tiered, in_memory = (each.samples_per_s.median for each in outcomes)
        ratios.append(tiered / in_memory)
    shutil.rmtree(folder)
    wall = Spread.of(seconds)
    return Report(
        question="How long does make demo take on this machine, and what do its two trainings come to?",
        tables=[outcome_table(f"tierstore demo: {wall.median:.0f} s from start to end", outcomes)],
        figures={
            "seconds": wall.median,
            "runs": {each.name: {"summary": each.summary} for each in outcomes},
        },
        goals=[
            Goal(name="seconds", value=round(wall.median, 1), at_most=180),
            Goal(
                name="samples a second with 10 % in DDR, of those with all rows in memory",
                value=round(statistics.median(ratios), 3),
                at_least=0.75,
            ),
            equal_bits(outcomes),
        ],
        notes=["Generated data; environment set up and kernels compiled before, where an earlier run did so."],
    )


if __name__ == "__main__":
    sys.exit(program("demo", run))
