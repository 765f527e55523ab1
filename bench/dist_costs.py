"""How near are the costs of steps over ranks, and how good are plans made of them?

Parts, each for itself with ``--only``: "errors" (of costs, on sets of tables that they were not fitted to), "plans" (of
Criteo's and other tables, on real ranks, beside plans by hand), "measured" (of ten sets of tables, on four real ranks,
beside greedy rules). All take the costs that "errors" measured.
"""

from typing import Final

from .common import Part, start
from .sharded.plans_part import ERRORS, MEASURED, PLANS

PARTS: Final[dict[str, Part]] = {"errors": ERRORS, "plans": PLANS, "measured": MEASURED}

if __name__ == "__main__":
    start("dist_costs")
