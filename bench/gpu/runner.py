"""Parts in turn, each in a process of its own: one that fails, hangs or breaks the device leaves the others alone.

A part is a module of this package. Its ``measure(rig, config, folder)`` yields its figures after each case, every time
all of them; "left" names the cases that are not measured yet. Its ``tell(figures)`` makes a report of them.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ..common import Part, Report, Run, plain, run_parts
from ..data import ROOT
from .rig import Rig

_GRACE_SECONDS: Final = 30
"""A part looks at the clock between its cases; so much later it is killed."""


def _measure(name: str, request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    """What the part found, "failed": why it ended before its end, or "", and the "device"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=request.folder) as scratch:
        path = Path(scratch).resolve() / "figures.json"
        told = {
            "device": device, "seed": request.config["seed"], "folder": str(request.folder.resolve()),
            "config": request.config[name], "path": str(path),
        }  # fmt: skip
        failed = _in_child(name, told, request.config[name]["limit_s"] + _GRACE_SECONDS)
        found = json.loads(path.read_text()) if path.exists() else {}
    return found | {"failed": failed, "device": device}


def _in_child(name: str, told: dict[str, Any], timeout_s: float) -> str:
    """Run it; why it failed, or ""."""
    places = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    # One workspace for each of cuBLAS's handles and streams: without, results may differ in bits from run to run.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-P", "-m", __name__, name]
    try:
        done = subprocess.run(
            command, input=json.dumps(told), text=True, stderr=subprocess.PIPE, env=environment, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        sys.stderr.write((error.stderr or b"").decode(errors="replace"))
        return f"killed after {timeout_s:.0f} s"
    sys.stderr.write(done.stderr)
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if done.returncode > 0 and lines else f"ended by signal {-done.returncode}"


def _child(name: str, told: dict[str, Any]) -> None:
    """Until the part is done or its time is up."""
    deadline, path = time.monotonic() + told["config"]["limit_s"], Path(told["path"])
    part, rig = importlib.import_module(f".{name}", __package__), Rig(told["device"], seed=told["seed"])
    for figures in part.measure(rig, told["config"], Path(told["folder"])):
        new = path.with_suffix(".new")
        new.write_text(json.dumps(plain(figures)))
        new.replace(path)
        if figures["left"] and time.monotonic() > deadline:
            break


def _tell(name: str, found: dict[str, Any]) -> Report:
    is_found = "left" in found
    report: Report = importlib.import_module(f".{name}", __package__).tell(found) if is_found else Report([])
    report.notes += [f"Part {name} failed: {found['failed']}."] if found["failed"] else []
    if is_found and found["left"]:
        report.notes.append(f"Part {name} ended before: {'; '.join(found['left'])}.")
    if found["device"] == "cpu":
        report.notes.append("On the CPU, by the kernels' twins: NO RESULTS, but a sign that the programs work.")
    return report


PARTS: Final = {
    name: Part(partial(_measure, name), partial(_tell, name))
    for name in ("rows", "training", "cached", "latency", "ssd")
}
"""In the order of their worth: if time or the machine ends, the first ones were measured."""


def run(request: Run) -> Report:
    """Every part in turn. What others found stands, whatever becomes of one.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available() and not request.quick:
        print("no CUDA device: nothing measured")
        sys.exit()
    question = "How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?"
    report = run_parts(request, question, PARTS)
    report.notes.append(_described())
    return report


def _described() -> str:
    """The device and what drives it."""
    if not torch.cuda.is_available():
        return f"On the CPU, torch {torch.__version__}."
    found = torch.cuda.get_device_properties(0)
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    size = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} multiprocessors"
    return f"On {size}, driver and clocks: {driver}; torch {torch.__version__}, CUDA {torch.version.cuda}."


if __name__ == "__main__":
    _child(sys.argv[1], json.load(sys.stdin))
