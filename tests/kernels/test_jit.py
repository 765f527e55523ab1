"""The on-disk cache of kernels: used by the next process, and dropped when any source changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tierstore
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled without the JIT")
RUN = """
import numpy as np
from tierstore.init import mix64
from tierstore.kernels import unique_in_order
keys, inverse = np.array([5, 5, 9]), np.empty(3, np.int32)
print(unique_in_order(keys, np.full(8, -1, np.int32), np.empty_like(keys), inverse))
"""


def run(package: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "NUMBA_CACHE_DIR": str(package / "numba")}
    return subprocess.run(
        [sys.executable, "-P", "-c", RUN], env=environment, capture_output=True, text=True, check=True
    )


def test_kernels_are_compiled_once_and_again_when_a_helper_changes(tmp_path: Path) -> None:
    """A copy of the package whose helper lies in another file than the kernel that it is compiled into."""
    source = Path(tierstore.__file__).parent
    for file in source.rglob("*.py"):
        target = tmp_path / "tierstore" / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    assert "compiling kernels that this machine has not used before" in run(tmp_path).stderr
    assert run(tmp_path).stderr == ""
    helper = tmp_path / "tierstore" / "init.py"
    helper.write_text(helper.read_text() + "\n")
    assert "compiling kernels that this machine has not used before" in run(tmp_path).stderr


def test_without_a_folder_to_keep_kernels_in_they_are_compiled_in_each_process() -> None:
    code = "from numba.core import caching; caching.CacheImpl._locator_classes = []\n" + RUN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    assert "set NUMBA_CACHE_DIR to a folder that this user can write to" in done.stderr
