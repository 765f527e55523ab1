"""What the compiler makes of the Triton kernels for sm_90: nothing that rounds in another way than the CPU does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", minversion="3.3", reason="Triton is for Linux; its compiler is called otherwise before 3.3"
)

ROUNDS_OTHERWISE = re.compile(
    r"\b(fma\.\w+\.f32|mad\.\w*\.?f32|div\.(full|approx)\S*|(r?sqrt|rcp)\.approx\S*|\S+\.ftz\S*)"
)


@pytest.fixture(scope="module")
def ptx_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PTX of each kernel, by name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("machine_code.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_no_instruction_rounds_otherwise(ptx_of: dict[str, str]) -> None:
    assert len(ptx_of) == 11
    for name, ptx in ptx_of.items():
        assert ".target sm_90" in ptx
        assert not set(ROUNDS_OTHERWISE.findall(ptx)), name


def test_roots_and_quotients_are_rounded_to_nearest(ptx_of: dict[str, str]) -> None:
    for name, ptx in ptx_of.items():
        assert ("sqrt.rn.f32" in ptx) == ("ada" in name), name
        assert ("div.rn.f32" in ptx) == ("ada" in name or name == "pool mean"), name


def test_rows_and_results_that_are_aligned_move_sixteen_bytes_a_thread(ptx_of: dict[str, str]) -> None:
    for name in ("pool sum", "dot", "runs", "sgd"):
        assert "ld.global.v4.b32" in ptx_of[name], name
    for name in ("pool sum", "runs", "sgd"):
        assert "st.global.v4.b32" in ptx_of[name], name
