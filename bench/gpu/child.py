"""The process of one part: ``python -m bench.gpu.child NAME ASKED FOUND``, as ``part.run_apart`` starts it."""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..common import aligned
from .part import Part
from .rig import Rig

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the part that the file ``asked`` describes; what it found goes to the file ``found``, as JSON."""
    name, asked, found = arguments
    request = json.loads(Path(asked).read_text())
    config = request["config"]
    module = importlib.import_module(f".{name}", __package__)
    part: Part = module.run(Rig(request["device"], seed=config["seed"]), config[name], Path(request["folder"]))
    # Shown at once, in case a later part takes the whole program down.
    for table in part.tables:
        print(f"\n{aligned(table)}", flush=True)
    Path(found).write_text(json.dumps(asdict(part)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
