"""Kernels compiled for the first time: one process compiles each, the wait is told, and nothing is left behind."""

import gc
import io
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierstore.init import fill_rows
from tierstore.kernels.first_use import FirstUse
from tierstore.kernels.jit import JIT_ENABLED

COMPILE = """
import os, sys, signal
import numpy as np
from tierstore.kernels import unique_in_order
from tierstore.kernels.jit import FIRST_USE
keys, inverse = np.array([5, 5, 9]), np.empty(3, np.int32)
unique_in_order(keys, np.full(8, -1, np.int32), np.empty_like(keys), inverse)
print(FIRST_USE._ahead.pid, flush=True)
if sys.argv[1:]: os.kill(os.getpid(), signal.SIGKILL)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_claimed_elsewhere(folder: Path, name: str) -> bool:
    child = os.fork()
    if child == 0:
        with FirstUse(folder).claimed(name, wait=False) as is_mine:
            os._exit(is_mine)
    return not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kernel_is_claimed_by_one_process(tmp_path: Path) -> None:
    first_use = FirstUse(tmp_path)
    with first_use.claimed("admit"), first_use.claimed("helper"):
        assert is_claimed_elsewhere(tmp_path, "admit")
        assert not is_claimed_elsewhere(tmp_path, "look_up")
    assert not is_claimed_elsewhere(tmp_path, "admit")


def test_the_wait_for_another_process_is_told_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with FirstUse(tmp_path).claimed("admit"):
            os.write(write, b"!")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
    os.read(read, 1)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with FirstUse(tmp_path).claimed("admit") as is_mine:
        assert is_mine
    assert sys.stderr.getvalue() == "\r\x1b[Ktierstore: compiling kernels, once for this machine: 0\r\x1b[K"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("stderr", [None, object(), "closed"], ids=["none", "no file", "closed"])
def test_compiling_needs_no_terminal(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # by handlers that other tests left
    monkeypatch.setattr(sys, "path", [*sys.path, Path("of a notebook")])
    first_use = FirstUse(None)
    kernel = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=fill_rows)})
    first_use.on_start(kernel)
    first_use.disown()
    assert gc.isenabled()


@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled without the JIT")
@pytest.mark.parametrize("how", [[], ["killed"]])
def test_the_process_that_compiles_ahead_ends_with_its_parent(tmp_path: Path, how: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *how],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-signal.SIGKILL if how else 0)
    for _ in range(100):
        if not Path(f"/proc/{int(done.stdout)}").exists():
            return
        time.sleep(0.05)
    pytest.fail("it goes on")
