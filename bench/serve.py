"""Does the server answer a ranking model's queries within their bounds over tables ten times its memory, and what else?

Parts, each for itself with ``--only``: "load" (latencies by load, the highest load within bounds, what the server adds
to the model), "peers" (the same lookups through Redis), "soak" (load for long while a trainer commits), "fresh" (from
a commit to its answers), "restart" (killed under load). The figures of parts that are not run again stay.
"""

import sys
import time
from typing import Any, Final

from .common import Report, Run, program
from .serving import fresh, latency, peers, restart, soak
from .serving.part import Part

__all__ = ["PARTS", "run"]

PARTS: Final[dict[str, Part]] = {
    "load": latency.PART,
    "peers": peers.PART,
    "soak": soak.PART,
    "fresh": fresh.PART,
    "restart": restart.PART,
}


def run(request: Run) -> Report:
    figures: dict[str, Any] = dict(request.earlier)
    for name in request.parts or tuple(PARTS):
        print(f"--- {name}", flush=True)
        start = time.perf_counter()
        found = PARTS[name].measure(request, figures)
        figures[name] = found | {"measured_seconds": round(time.perf_counter() - start, 1)}
    figures = {name: figures[name] for name in PARTS if name in figures}
    told = [PARTS[name].tell(found) for name, found in figures.items()]
    return Report(
        question="Does the server answer within its bounds over tables ten times its memory, and keep doing so?",
        tables=[table for each in told for table in each.tables],
        figures=figures,
        goals=[goal for each in told for goal in each.goals],
        notes=[note for each in told for note in each.notes],
    )


if __name__ == "__main__":
    sys.exit(program("serve", run, parts=tuple(PARTS)))
