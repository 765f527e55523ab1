"""Every target on its seeds and random changes of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.fuzz.__main__ import NAMES, STORED


@pytest.mark.parametrize("names", [STORED, NAMES[len(STORED) :]], ids=["stored", "given"])
@pytest.mark.parametrize("mutations", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_seeds_and_random_changes(names: tuple[str, ...], mutations: int, tmp_path: Path) -> None:
    """In a process of its own: what is read may end it."""
    command = [sys.executable, "-m", "tests.fuzz", *names, "--mutations", str(mutations), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=900)
    said = f"ended with {done.returncode}; input: {tmp_path}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(names)
