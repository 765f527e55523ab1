"""Processes of ``python -m bench.crash``, several at a time, and what came of them together."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..data import ROOT
from .chain import Tally

__all__ = ["Outcome", "kill_runs"]

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Only a process without other threads may be forked; a graphics processor would bring some."""


class Outcome(NamedTuple):
    """``seconds``: what parts of a run take that is not killed, in the first process."""

    tally: Tally
    seconds: dict[str, float]


def kill_runs(folder: Path, *, kills: Sequence[int], rounds: int, commits: int, seed: int) -> Outcome:
    """One process for each of ``kills``, with a seed of its own from ``seed`` on; the others are its arguments.

    Raises:
        RuntimeError: one of them failed itself.
    """
    common = ["--dir", folder, "--rounds", rounds, "--commits", commits]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.crash", *map(str, [*common, "--seed", seed + number, "--kills", count])],
            cwd=ROOT, env=os.environ | _ONE_THREAD | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )
        for number, count in enumerate(kills)
    ]  # fmt: skip
    tally, seconds = Tally(), []
    try:
        for process in processes:
            out, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {out}")
            found = json.loads(out.splitlines()[-1])
            seconds.append(found.pop("seconds"))
            tally.add(found)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Outcome(tally, seconds[0])
