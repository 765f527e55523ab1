"""Runs of the trainer in processes of their own: one, or the ranks that torchrun starts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.settings.sections import to_toml
from tierstore.train.config import load, parse_override

from ..data import ROOT, require_criteo

__all__ = ["RUN_FILE", "begin", "summary_of"]

RUN_FILE = ROOT / "examples/criteo.toml"


def begin(
    folder: Path, ranks: int, settings: Mapping[str, Any], *, restarts: int = 0, module: str = "tierstore"
) -> "subprocess.Popen[bytes]":
    """Train the Criteo example in a folder, with keys changed; what it says goes to ``log`` there.

    Args:
        ranks: 1 for a process without torchrun.
        settings: by keys of the run file, as TOML has them.
        module: what Python runs, with the command line of tierstore.
    """
    folder.mkdir(parents=True)
    given = {"data.path": f'"{require_criteo()}"', "store.path": f'"{folder / "store"}"', **settings}
    run = load(RUN_FILE, [parse_override(f"{name}={value}") for name, value in given.items()])
    (folder / "run.toml").write_text(to_toml(run))
    launcher = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        "-m",
    ]
    command = [sys.executable, "-m", *(launcher if ranks > 1 else []), module, "train", "run.toml", "--resume"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--json", "summary.json", "--digest"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def summary_of(folder: Path, run: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """What a run that ended says, once it ends.

    Raises:
        RuntimeError: it failed; has the end of what it said.
    """
    if status := run.wait():
        raise RuntimeError(f"training in {folder} ended with status {status}:\n{(folder / 'log').read_text()[-4000:]}")
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
