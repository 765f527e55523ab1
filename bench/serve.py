"""Does the server answer a ranking model's queries within their bounds over tables ten times its memory, and what else?

Parts, each for itself with ``--only``: "load" (latencies by load, the highest load within bounds), "peers" (the same
lookups through Redis), "fresh" (from a commit to its answers), "restart" (killed under load). The figures of parts that
are not run again stay.
"""

import sys
from typing import Final

from .common import Part, Report, Run, program, run_parts
from .serving import fresh, latency, peers, restart

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "load": latency.PART,
    "peers": peers.PART,
    "fresh": fresh.PART,
    "restart": restart.PART,
}


def run(request: Run) -> Report:
    question = "Does the server answer within its bounds over tables ten times its memory?"
    return run_parts(request, question, PARTS)


if __name__ == "__main__":
    sys.exit(program("serve", run, parts=tuple(PARTS)))
