"""Processes of ``python -m bench.crash``, several at a time, and what came of them together."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.data import ROOT

from . import resharding, sharing
from .chain import Tally

__all__ = ["Outcome", "kill_ranks", "kill_runs", "share_runs"]

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Only a process without other threads may be forked; a graphics processor would bring some."""


class Outcome(NamedTuple):
    """``seconds``: what parts of a run take that is not killed, in the first process."""

    tally: Tally
    seconds: dict[str, float]


def kill_runs(folder: Path, *, kills: Sequence[int], rounds: int, stride: int, commits: int, seed: int) -> Outcome:
    """One process for each of ``kills``, with a seed of its own from ``seed`` on; the others are its arguments.

    Raises:
        RuntimeError: one of them failed itself.
    """
    common = "--rounds", rounds, "--stride", stride, "--commits", commits
    processes = [
        _start("bench.crash", folder, "--seed", seed + number, "--kills", count, *common)
        for number, count in enumerate(kills)
    ]
    found = _results(processes)
    tally = Tally()
    seconds = [each.pop("seconds") for each in found]
    for each in found:
        tally.add(each)
    return Outcome(tally, seconds[0])


def kill_ranks(folder: Path, *, kills: Sequence[int], seed: int) -> resharding.Tally:
    """One store for each of ``kills``, with a seed of its own from ``seed`` on; see ``resharding``.

    Raises:
        RuntimeError: one of the processes failed itself.
    """
    processes = [
        _start("bench.crash.resharding", folder, "--seed", seed + number, "--kills", count)
        for number, count in enumerate(kills)
    ]
    tally = resharding.Tally()
    for each in _results(processes):
        tally.add(each)
    return tally


def share_runs(folder: Path, *, rounds: Sequence[int], seed: int) -> sharing.Tally:
    """One store for each of ``rounds``, with a seed of its own from ``seed`` on; see ``sharing.share``.

    Raises:
        RuntimeError: one of the processes failed itself.
    """
    processes = [
        _start("bench.crash.sharing", folder, "--seed", seed + number, "--rounds", count)
        for number, count in enumerate(rounds)
    ]
    tally = sharing.Tally()
    for each in _results(processes):
        for name, value in each.items():
            setattr(tally, name, getattr(tally, name) + value)
    return tally


def _results(processes: "Sequence[subprocess.Popen[str]]") -> list[dict[str, Any]]:
    try:
        return [_result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(module: str, folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", module, "--dir", str(folder), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | _ONE_THREAD | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {out}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
