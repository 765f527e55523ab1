"""What compilers make of the Triton kernels for sm_90: nothing that rounds in another way than the CPU does, and loops
that keep the memory busy."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hbm.machine_code import ROW_KERNELS

pytest.importorskip("triton", minversion="3.3", reason="Triton is for Linux; its compiler was another before 3.3")

ROOT = Path(__file__).parents[2]
ROUNDS_OTHERWISE = re.compile(
    r"\b(fma\.\w+\.f32|mad\.\w*\.?f32|div\.(full|approx)\S*|(r?sqrt|rcp)\.approx\S*|\S+\.ftz\S*)"
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``machine_code`` finds. Triton keeps what it compiled for the next run."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "triton")
    command = [sys.executable, "-m", "tests.hbm.machine_code"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert not done.returncode, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_each_kernel_is_compiled(found: dict[str, Any]) -> None:
    assert found["missing"] == found["twins"] == []
    assert {each["kernel"] for each in found["launches"].values()} >= ROW_KERNELS


def test_nothing_rounds_otherwise_than_on_the_cpu(found: dict[str, Any]) -> None:
    for name, each in found["launches"].items():
        assert ".target sm_90" in each["ptx"]
        assert not set(ROUNDS_OTHERWISE.findall(each["ptx"])), name
        is_root = each["kernel"] == "update_tile" and "ada" in name
        assert ("sqrt.rn.f32" in each["ptx"]) == is_root, name
        is_mean = "mean" in name and each["kernel"] in ("pool_bags", "sum_runs")
        assert ("div.rn.f32" in each["ptx"]) == (is_root or is_mean), name


def test_registers_suffice_and_loops_keep_the_memory_busy(found: dict[str, Any]) -> None:
    """Four rows are loaded before the first is added, none waits for other warps, and a thread moves 16 bytes where
    rows and results are aligned and it has so much: not of 100 columns, nor of 16 with 16 bits each."""
    num_loops = {"pool_bags": 1, "sum_runs": 1, "update_tile": 3}
    for name, each in found["launches"].items():
        assert not each["spills"], name
        if each["kernel"] not in ROW_KERNELS:
            continue
        assert each["registers"] <= 64, name
        assert each["shared_bytes"] <= 6 << 10, name
        assert not sum(loop["barriers"] for loop in each["loops"]), name
        if each["kernel"] in num_loops:
            assert len(each["loops"]) == num_loops[each["kernel"]], name
            assert min(loop["loaded_first"] for loop in each["loops"]) >= 4, name
        if each["kernel"] != "sum_super_runs" and "of 100" not in name and "pool max" not in name:
            assert "ld.global.v4.b32" in each["ptx"], name
            assert "st.global.v4.b32" in each["ptx"] or each["kernel"] == "dot_positions", name
