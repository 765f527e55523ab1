"""How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?

``python -m bench.gpu`` on any machine with an NVIDIA GPU runs every part, in a few minutes; it needs torch built for
CUDA (which brings Triton), some 30 GiB of GPU memory, 32 GiB of host memory and a C compiler for Triton's launchers,
and no network. ``--only find,rows`` runs some parts only, ``--dir`` says where stores are built. Sizes are those of
``bench/gpu.toml``: for a smaller GPU, copy it, make ``rows``, ``slots`` or ``table_sizes`` smaller, and give it with
``--config``. Without a CUDA device it says so and writes nothing; with ``--quick`` every part then runs on the CPU at
tiny sizes, to see that it works.
"""

import importlib
import os
import sys
import time
import traceback

import torch

from ..common import Report, Run
from .part import PARTS, Part
from .rig import Rig

__all__ = ["PARTS", "run"]

# One workspace for each of cuBLAS's handles and streams: without, its results may differ in bits from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(request: Run) -> Report:
    """Every part in turn. Those that failed are in ``figures["failed"]``, by name: why; what others found stands.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available() and not request.quick:
        print("no CUDA device: nothing measured")
        sys.exit()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Part] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in request.parts or PARTS:
        print(f"\n--- {name}", flush=True)
        start = time.monotonic()
        try:
            module = importlib.import_module(f".{name}", __package__)
            rig = Rig(device, seed=request.config["seed"])
            found[name] = module.run(rig, request.config[name], request.folder)
        except Exception as error:  # whatever is wrong with a part, the others are measured
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {failed.get(name, 'done')}, {seconds[name]} s", flush=True)
    notes = [note for part in found.values() for note in part.notes]
    notes += [f"Part {name} failed: {why}." for name, why in failed.items()]
    if device == "cpu":
        notes.append("On the CPU, by the kernels' twins in torch: NO RESULTS, but a sign that the programs work.")
    return Report(
        question="How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?",
        tables=[table for part in found.values() for table in part.tables],
        figures={name: part.figures for name, part in found.items()} | {"failed": failed, "part_seconds": seconds},
        goals=[goal for part in found.values() for goal in part.goals],
        notes=notes,
    )
