"""How large may the batch be? Batches, sharpness of minima and Hessian-free steps on real data.

Parts, each for itself with ``--only``: "sets" (AUC against batch size). The figures of a part that is not run again
stay.
"""

import sys
from typing import Final

from .common import Part, Report, Run, program, run_parts
from .generalise import sets_part

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "sets": sets_part.PART,
}


def run(request: Run) -> Report:
    return run_parts(request, "How large may the batch be, and what do Hessian-free steps change?", PARTS)


if __name__ == "__main__":
    sys.exit(program("generalisation", run, parts=tuple(PARTS)))
