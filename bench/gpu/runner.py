"""Parts in turn, each in a process of its own: one that fails, hangs or breaks the device leaves the others alone."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..common import Report, Run, aligned
from ..data import ROOT
from .part import PARTS, Part

__all__ = ["run"]

_GRACE_SECONDS: Final = 30
"""A part looks at the clock between its cases; so much later it is killed."""


class _Outcome(NamedTuple):
    """What became of a part.

    Attributes:
        part: what it found; None if that was nothing.
        failed: why it ended before its end, or "".
    """

    part: Part | None
    failed: str
    seconds: float


def run(request: Run) -> Report:
    """Every part in turn. What others found stands, whatever becomes of one.

    Parts that failed are in ``figures["failed"]``, by name: why. What a part had no time for is in
    ``figures["ran_out"]``.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available() and not request.quick:
        print("no CUDA device: nothing measured")
        sys.exit()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    found: dict[str, _Outcome] = {}
    for name in request.parts or PARTS:
        left = request.config["total_s"] - (time.monotonic() - started)
        print(f"\n--- {name}, {request.config[name]['limit_s']} s at most", flush=True)
        found[name] = _outcome(request, name, device, left)
        for table in found[name].part.tables if found[name].part else ():  # type: ignore[union-attr]
            print(f"\n{aligned(table)}")
        print(f"\n{name}: {found[name].failed or 'done'}, {found[name].seconds} s", flush=True)
        request.save(_report(found, device))
    return _report(found, device)


def _outcome(request: Run, name: str, device: str, left_s: float) -> _Outcome:
    if left_s <= 0:
        return _Outcome(None, f"no time was left of {request.config['total_s']} s in all", 0.0)
    config = request.config[name]
    limit = min(config["limit_s"], left_s)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=request.folder) as scratch:
        path = Path(scratch) / f"{name}.json"
        told = {
            "device": device, "seed": request.config["seed"], "folder": str(request.folder.resolve()),
            "config": config, "path": str(path.resolve()), "limit_s": limit,
        }  # fmt: skip
        failed = _in_child(name, told, limit + _GRACE_SECONDS)
        part = Part.of_json(json.loads(path.read_text())) if path.exists() else None
    return _Outcome(part, failed, round(time.monotonic() - start, 1))


def _in_child(name: str, told: dict[str, Any], timeout_s: float) -> str:
    """Run it; why it failed, or ""."""
    command = [sys.executable, "-P", "-m", f"{__package__}.child", name]
    places = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    try:
        done = subprocess.run(
            command, input=json.dumps(told), text=True, stderr=subprocess.PIPE, env=environment, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        sys.stderr.write(_text(error.stderr))
        return f"killed after {timeout_s:.0f} s"
    sys.stderr.write(done.stderr)
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if done.returncode > 0 and lines else f"ended by signal {-done.returncode}"


def _text(written: Any) -> str:
    """What a process wrote before it was killed."""
    return written.decode(errors="replace") if isinstance(written, bytes) else written or ""


def _report(found: dict[str, _Outcome], device: str) -> Report:
    parts = {name: outcome.part for name, outcome in found.items() if outcome.part is not None}
    failed = {name: outcome.failed for name, outcome in found.items() if outcome.failed}
    left = {name: part.left for name, part in parts.items() if part.left}
    notes = [note for part in parts.values() for note in part.notes]
    notes += [f"Part {name} failed: {why}." for name, why in failed.items()]
    notes += [f"Part {name} ended before: {'; '.join(cases)}." for name, cases in left.items()]
    if device == "cpu":
        notes.append("On the CPU, by the kernels' twins in torch: NO RESULTS, but a sign that the programs work.")
    return Report(
        question="How near does the GPU tier come to its device's limits, in kernels, in training and in lookups?",
        tables=[table for part in parts.values() for table in part.tables],
        figures={name: part.figures for name, part in parts.items()}
        | {"failed": failed, "ran_out": left, "part_seconds": {name: each.seconds for name, each in found.items()}},
        goals=[goal for part in parts.values() for goal in part.goals],
        notes=notes,
    )
