"""An earlier version of the library, as a peer in the same run."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .data import ROOT

__all__ = ["extract", "measure_earlier"]


def extract(commit: str, folder: Path, *paths: str) -> Path:
    """The tree of a commit, or what of it lies under ``paths``, in a folder that is kept for the next run."""
    target = folder / "-".join(["version", commit, *paths])
    if not target.exists():
        packed = subprocess.run(["git", "archive", commit, *paths], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target, filter="tar")
    return target


def measure_earlier(commit: str, name: str, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """The report of benchmark ``name`` over the library of a commit, from stores of its own.

    Raises:
        CalledProcessError: git has no such commit, or the benchmark failed over it.
    """
    library = extract(commit, folder, "tierstore")
    own = folder / f"stores-{commit}"
    path = own / f"{name}.json"
    command = [sys.executable, "-P", "-m", f"bench.{name}", "--dir", str(own), "--json", str(path), *flags]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(library), str(ROOT)])}
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = json.loads(path.read_text())
    return found
