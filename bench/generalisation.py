"""How large may the batch be? Batches, sharpness of minima and Hessian-free steps on real data.

Parts, each for itself with ``--only``: "exact" (solver, eigenvalues and sharpness beside matrices formed whole), "sets"
(AUC against batch size), "digits" (loss against iterations), "ranks" (steps and seconds to a fixed loss). The figures
of a part that is not run again stay.
"""

import sys
from typing import Final

from .common import Part, Report, Run, program, run_parts
from .generalise import digits_part, exact_part, ranks_part, sets_part

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "exact": exact_part.PART,
    "sets": sets_part.PART,
    "digits": digits_part.PART,
    "ranks": ranks_part.PART,
}


def run(request: Run) -> Report:
    return run_parts(request, "How large may the batch be, and what do Hessian-free steps change?", PARTS)


if __name__ == "__main__":
    sys.exit(program("generalisation", run, parts=tuple(PARTS)))
