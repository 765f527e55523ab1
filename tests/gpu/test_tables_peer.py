"""The benchmark's own peer in CUDA C++: valid for a GPU, and right on one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.gpu.rig import Rig
from bench.gpu.tables_peer import _SEGMENT, SOURCE, source_for, tables_missing


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dim", [16, 128])
def test_it_compiles_for_a_gpu_without_spills(dim: int, tmp_path: Path) -> None:
    path = tmp_path / "tables.cu"
    path.write_text(source_for(dim))
    command = ["nvcc", "-arch=sm_90", "-Xptxas", "-v,-Werror", "-Werror", "all-warnings", "-cubin", "-o", "out"]
    done = subprocess.run([*command, path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert re.findall(r"(\d+) bytes spill", done.stderr) == ["0"] * 6


def test_segments_are_as_long_as_its_caller_thinks() -> None:
    assert f"SEGMENT = {_SEGMENT};" in SOURCE.read_text()


@pytest.mark.gpu
def test_it_is_right_on_a_gpu() -> None:
    assert tables_missing(Rig("cuda")) == ""
