"""How near are the costs of steps over ranks to what steps take, and how good are the plans made of them?

Parts, each for itself with ``--only``: "errors" (of costs, on sets of tables that they were not fitted to), "sets"
(plans of many tables, simulated by the costs, beside greedy rules), "plans" (of Criteo's and other tables, on real
ranks, beside plans by hand), "measured" (of ten sets of tables, on four real ranks, beside greedy rules). All take the
costs that "errors" measured.
"""

import sys
from typing import Final

from .common import Part, Report, Run, program, run_parts
from .sharded import costs_part, measured_part, plans_part, sets_part

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "errors": costs_part.PART, "sets": sets_part.PART, "plans": plans_part.PART, "measured": measured_part.PART
}  # fmt: skip


def run(request: Run) -> Report:
    return run_parts(request, "How near are the costs of steps over ranks, and how good are plans made of them?", PARTS)


if __name__ == "__main__":
    sys.exit(program("dist_costs", run, parts=tuple(PARTS)))
