"""One part of the GPU benchmark, in a process of its own: ``python -m bench.gpu.child NAME``, the rest on stdin.

What was found is in the file that stdin names, written again after each case.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .part import Part
from .rig import Rig

__all__ = ["main"]


def main(name: str, told: dict[str, Any]) -> None:
    """Run part ``name`` until it is done or its time is up.

    Args:
        told: "device", "seed", "folder", "config" of the part, "path" of the file and "limit_s".
    """
    deadline = time.monotonic() + told["limit_s"]
    path = Path(told["path"])
    module = importlib.import_module(f".{name}", __package__)
    rig = Rig(told["device"], seed=told["seed"])
    for part in module.run(rig, told["config"], Path(told["folder"])):
        _write(path, part)
        if part.left and time.monotonic() > deadline:
            print(f"{name}: out of time before {', '.join(part.left)}", flush=True)
            break


def _write(path: Path, part: Part) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(part)))
    beside.replace(path)


if __name__ == "__main__":
    # One workspace for each of cuBLAS's handles and streams: without, results may differ in bits from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main(sys.argv[1], json.load(sys.stdin))
