"""Does the server answer within its bounds over tables ten times its memory?

A ranking model's queries, and what else a server is asked. Parts, each for itself with ``--only``: "load" (latencies by
load, the highest load within bounds), "peers" (the same lookups through Redis), "fresh" (from a commit to its answers),
"beside" (the server of an earlier version). The figures of parts that are not run again stay.
"""

from typing import Final

from .common import Part, start
from .serving import beside, fresh, latency, peers

PARTS: Final[dict[str, Part]] = {"load": latency.PART, "peers": peers.PART, "fresh": fresh.PART, "beside": beside.PART}

if __name__ == "__main__":
    start("serve")
