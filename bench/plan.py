"""Is what the planner says true of runs that are measured, and what does finding it out take?

Parts, each for itself with ``--only``: "curves" (beside stores, from samples), "machine" (this machine, measured),
"steps" (hit rates and step times, predicted and measured), "known" (the same of whole models), "unseen" (of workloads
that nothing was fitted to),
"record" (what recording costs), "examples" (plans on paper). The figures of parts that are not run again stay.

On few cores run "steps", "known" and "unseen" with OMP_WAIT_POLICY=PASSIVE: else OpenMP's threads spin between two
kernels, which is no work that a planner could know of. The report keeps what was set.
"""

import sys
from typing import Final

from .common import Report, Run, program
from .parts import Part, run_parts
from .planning import curve_part, example_part, record_part, step_part, unseen_part
from .planning.machine_part import PART as MACHINE

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "curves": curve_part.PART,
    "machine": MACHINE,
    "steps": step_part.PART,
    "known": unseen_part.KNOWN,
    "unseen": unseen_part.UNSEEN,
    "record": record_part.PART,
    "examples": example_part.PART,
}


def run(request: Run) -> Report:
    return run_parts(request, "Is what the planner says true of runs, and what does finding it out take?", PARTS)


if __name__ == "__main__":
    sys.exit(program("plan", run, parts=tuple(PARTS)))
