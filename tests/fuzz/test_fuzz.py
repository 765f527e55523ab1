"""Every target on its seeds and random changes of them; and, among the long tests, guided by coverage."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.fuzz.__main__ import NAMES, STORED


def drive(out: Path, *arguments: object) -> str:
    """Run the driver in a process of its own: what it reads may end it."""
    command = [sys.executable, "-m", "tests.fuzz", *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=900)
    said = f"ended with {done.returncode}; input: {out}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    assert done.returncode == 0, said
    return done.stdout


@pytest.mark.parametrize("names", [STORED, NAMES[len(STORED) :]], ids=["stored", "given"])
@pytest.mark.parametrize("mutations", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_seeds_and_random_changes(names: tuple[str, ...], mutations: int, tmp_path: Path) -> None:
    said = drive(tmp_path, *names, "--mutations", mutations)
    assert [line.split(":")[0] for line in said.splitlines()] == list(names)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris: pip install 'tierstore[fuzz]'")
@pytest.mark.parametrize("name", NAMES)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    drive(tmp_path, name, "--seconds", 240)
    assert [path.name for path in tmp_path.glob(f"{name}-*")] == []
