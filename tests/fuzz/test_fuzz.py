"""Every target on its seeds, its corpus and random changes of both; and, among the long tests, guided by coverage."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from bench.data import ROOT
from tests.fuzz.__main__ import NAMES, STORED

CORPUS_BYTES_MAX = 100_000


def drive(out: Path, *arguments: object) -> str:
    """Run the driver in a process of its own: what it reads may end it."""
    command = [sys.executable, "-m", "tests.fuzz", *map(str, arguments), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=900)
    assert done.returncode == 0, (
        f"ended with {done.returncode}; input: {out}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.mark.parametrize("names", [STORED, NAMES[len(STORED) :]], ids=["stored", "given"])
def test_seeds_corpus_and_random_changes(names: tuple[str, ...], tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        names = tuple(name for name in names if name != "parquet")
    said = drive(tmp_path, *names)
    assert [line.split(":")[0] for line in said.splitlines()] == list(names)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris: pip install 'tierstore[fuzz]'")
@pytest.mark.parametrize("name", NAMES)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    drive(tmp_path, name, "--seconds", 240)
    found = [path.name for path in tmp_path.glob(f"{name}-*")]
    assert found == []
