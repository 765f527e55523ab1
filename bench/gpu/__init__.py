"""How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?

``python -m bench.gpu`` on any machine with an NVIDIA GPU runs every part, in under 8 minutes, each in a process of its
own. It needs torch built for CUDA (which brings Triton), some 40 GiB of GPU memory, 32 GiB of host memory and a C
compiler for Triton's launchers, and no network. ``--only rows,training`` runs some parts only, ``--dir`` says where
stores are built. Sizes are those of ``bench/gpu.toml``: for a smaller GPU, copy it, make ``rows`` or ``table_sizes``
smaller, and give it with ``--config``. The report is written again after every part. Without a CUDA device it says so
and writes nothing; with ``--quick`` every part then runs on the CPU at tiny sizes, to see that it works.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ..child import in_child
from ..common import Part, Report, Run, plain, run_parts
from . import cached, latency, rows, ssd, training
from .rig import Rig

Figures = dict[str, Any]
_MODULES: Final = {"rows": rows, "training": training, "cached": cached, "latency": latency, "ssd": ssd}
"""In the order of their worth: if time or the machine ends, the first ones were measured."""


def _in_child(measure: Callable[[Rig, Figures, Path], Figures], config: Figures, seed: int, folder: Path) -> Figures:
    found: Figures = plain(measure(Rig("cuda" if torch.cuda.is_available() else "cpu", seed=seed), config, folder))
    return found


def _measure(name: str, request: Run, _: Figures) -> Figures:
    config, folder = request.config, request.folder.resolve()
    return in_child(_in_child, _MODULES[name].measure, config[name], config["seed"], folder)


PARTS: Final = {name: Part(partial(_measure, name), each.tell) for name, each in _MODULES.items()}


def run(request: Run) -> Report:
    """Every part in turn; SystemExit where there is no CUDA device."""
    if not torch.cuda.is_available() and not request.quick:
        print("no CUDA device: nothing measured")
        sys.exit()
    # One workspace for each of cuBLAS's handles and streams: without, results may differ in bits from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    report = run_parts(request, PARTS)
    report.notes.append(_described())
    return report


def _described() -> str:
    """The device and what drives it."""
    if not torch.cuda.is_available():
        return "On the CPU, by the kernels' twins: NO RESULTS, but a sign that the programs work."
    found = torch.cuda.get_device_properties(0)
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    size = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} multiprocessors"
    return f"On {size}, driver and clocks: {driver}; torch {torch.__version__}, CUDA {torch.version.cuda}."
