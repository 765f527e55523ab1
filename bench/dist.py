"""What do tables sharded over ranks cost, beside TorchRec's and one process?

Ranks of a gloo group. Parts, each for itself with ``--only``: "bytes" (on the wire), "steps" (their time), "towers"
(steps over slow links between hosts; needs root). The figures of a part that is not run again stay. Needs
``make peers``. Tests compare losses with TorchRec's.
"""

from typing import Final

from .common import Part, start
from .peers import torchrec
from .sharded import bytes_part, step_part, towers_part

PARTS: Final[dict[str, Part]] = {"bytes": bytes_part.PART, "steps": step_part.PART, "towers": towers_part.PART}

if __name__ == "__main__":
    if not torchrec.is_there():
        raise SystemExit("This benchmark compares with TorchRec: make peers brings it.")
    start("dist")
