"""How large may the batch be, and what do Hessian-free steps change?

Batches, sharpness of minima and Hessian-free steps on real data. Parts, each for itself with ``--only``: "sets" (AUC
against batch size), "digits" (loss against iterations), "ranks" (steps and seconds to a fixed loss). The figures of a
part that is not run again stay.
"""

from typing import Final

from .common import Part, start
from .generalise import digits_part, ranks_part, sets_part

__all__ = ["PARTS"]

PARTS: Final[dict[str, Part]] = {"sets": sets_part.PART, "digits": digits_part.PART, "ranks": ranks_part.PART}

if __name__ == "__main__":
    start("generalisation")
