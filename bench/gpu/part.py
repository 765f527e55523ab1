"""Parts of the GPU benchmark, each in a process of its own: a fault of the device ends one part and not the others.

A part is a module of this package with ``run(rig, config, folder) -> Part``.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from ..common import Goal, Run, Table
from ..data import ROOT

__all__ = ["PARTS", "Part", "run_apart"]

PARTS: Final = ("limits", "find", "rows", "training", "ssd", "latency")
_LEAST_SECONDS: Final = 20.0
"""A part is not begun with less time than that left."""


@dataclass(kw_only=True)
class Part:
    """What a part found; as in ``common.Report``.

    Attributes:
        failed: why it found nothing, or "".
    """

    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""

    @classmethod
    def from_json(cls, text: str) -> "Part":
        """From what ``json.dumps(asdict(part))`` gave."""
        found = json.loads(text)
        tables = [Table(**each) for each in found.pop("tables")]
        return cls(tables=tables, goals=[Goal(**each) for each in found.pop("goals")], **found)


def run_apart(name: str, request: Run, device: str, deadline: float) -> Part:
    """The part in a fresh process, ended if it takes longer than the configuration or the deadline allow.

    Args:
        deadline: of ``time.monotonic``.
    """
    seconds = min(request.config["part_seconds"], deadline - time.monotonic())
    if seconds < _LEAST_SECONDS:
        return Part(failed="no time was left for it")
    folder = request.folder.resolve()
    asked, found = (folder / f"gpu-{name}-{what}.json" for what in ("asked", "found"))
    found.unlink(missing_ok=True)
    asked.write_text(json.dumps({"config": request.config, "folder": str(folder), "device": device}))
    command = [sys.executable, "-m", "bench.gpu.child", name, str(asked), str(found)]
    # One workspace for each of cuBLAS's handles and streams: without, its results may differ in bits from run to run.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return Part(failed=f"it was ended after {seconds:.0f} s")
    if status or not found.exists():
        return Part(failed=f"its process ended with status {status}; what it printed is above")
    return Part.from_json(found.read_text())
