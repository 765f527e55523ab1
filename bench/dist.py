"""What do tables sharded over the ranks of a gloo group cost, beside TorchRec's and one process?

Parts, each for itself with ``--only``: "bytes" (on the wire), "steps" (their time), "towers" (steps over slow links
between hosts; needs root). The figures of a part that is not run again stay. Needs ``make peers``. Tests compare losses
with TorchRec's.
"""

import sys
from typing import Final

from .common import Part, Report, Run, program, run_parts
from .peers import torchrec
from .sharded import bytes_part, step_part, towers_part

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "bytes": bytes_part.PART,
    "steps": step_part.PART,
    "towers": towers_part.PART,
}


def run(request: Run) -> Report:
    if not torchrec.is_there():
        raise SystemExit("This benchmark compares with TorchRec: make peers brings it.")
    return run_parts(request, "What do tables sharded over ranks cost, beside TorchRec's and one process?", PARTS)


if __name__ == "__main__":
    sys.exit(program("dist", run, parts=tuple(PARTS)))
