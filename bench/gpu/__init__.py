"""How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?

``python -m bench.gpu`` on any machine with an NVIDIA GPU runs every part, in a few minutes; it needs torch built for
CUDA (which brings Triton), some 30 GiB of GPU memory, 32 GiB of host memory and a C compiler for Triton's launchers,
and no network. ``--parts find,rows`` runs some parts only, ``--dir`` says where stores are built. Sizes are those of
``bench/gpu.toml``: for a smaller GPU, copy it, make ``rows``, ``slots`` or ``table_sizes`` smaller, and give it with
``--config``. Without a CUDA device it says so and writes nothing; ``--device cpu --quick`` runs every part on the CPU
at tiny sizes, to see that they work: its figures are no results.
"""

import time
from collections.abc import Sequence

from ..common import Report, Run
from .part import PARTS, Part, run_apart

__all__ = ["run"]


def run(request: Run, *, device: str = "cuda", parts: Sequence[str] = PARTS) -> Report:
    """Every part in turn. Those that failed are in ``figures["failed"]``, by name: why."""
    deadline = time.monotonic() + request.config["total_seconds"]
    found: dict[str, Part] = {}
    seconds: dict[str, float] = {}
    for name in parts:
        print(f"\n--- {name}", flush=True)
        start = time.monotonic()
        found[name] = run_apart(name, request, device, deadline)
        seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {found[name].failed or 'done'}, {seconds[name]} s", flush=True)
    failed = {name: part.failed for name, part in found.items() if part.failed}
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
