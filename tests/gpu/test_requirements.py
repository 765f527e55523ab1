"""What the GPU benchmark says before it needs anything."""

import importlib.metadata
import subprocess
import sys

import pytest

from bench.data import ROOT
from bench.gpu.requirements import Lack, _lack_of, _numbers, lacks, told

BLOCKED = ("torch", "numpy", "numba", "llvmlite", "psutil", "safetensors", "tqdm", "xxhash", "lmdb")


def start(*blocked: str) -> "subprocess.CompletedProcess[str]":
    """``python -m bench.gpu --quick`` where these cannot be imported; it says when it comes to run a part."""
    program = f"""
import runpy, sys
sys.modules |= dict.fromkeys({blocked!r})
sys.argv[1:] = ["--quick", "--only", "nothing"]
runpy.run_module("bench.gpu", run_name="__main__")
"""
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_everything_that_is_missing_is_named_at_once() -> None:
    done = start(*BLOCKED)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("The GPU benchmark cannot run:\n- torch: ModuleNotFoundError")
    assert "Traceback" not in done.stderr
    command = next(line for line in done.stderr.splitlines() if "-m pip install" in line)
    for name in BLOCKED:
        assert f"- {name}: ModuleNotFoundError" in done.stderr
        assert name in command
    assert "'lmdb>=3,<4'" in command


def test_with_everything_there_it_goes_on() -> None:
    done = start()
    assert done.returncode == 2
    assert "no part nothing" in done.stderr
    assert lacks() == []


@pytest.mark.parametrize(
    ("requirement", "missing"),
    [("xxhash>=3.4", False), ("xxhash>=99", True), ("xxhash>=1,<2.5", True), ("xxhash", False), ("no_such>=1", True)],
)
def test_versions_are_looked_at(requirement: str, missing: bool) -> None:
    assert (_lack_of(requirement) is not None) == missing


def test_a_version_is_told_with_what_was_wanted() -> None:
    lack = _lack_of("tqdm>=99")
    version = importlib.metadata.version("tqdm")
    assert lack == Lack("tqdm", f"{version} is installed, wanted >=99", "tqdm>=99")
    assert "install 'tqdm>=99'" in told([lack])
    assert "pip" not in told([Lack("a C compiler", "why", "")])


def test_release_numbers() -> None:
    assert _numbers("2.11.0+cu130") == (2, 11)
    assert _numbers("3.0.0") == (3,)
    assert _numbers("1.2rc1") == (1, 2)
