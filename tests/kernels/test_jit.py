"""The on-disk cache of kernels: used by the next process, and dropped when any source changes."""

import gc
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
from numba.core.caching import IndexDataCacheFile

import tierstore
from tierstore.kernels import jit
from tierstore.kernels.jit import JIT_ENABLED, FirstUse
from tierstore.kernels.slots import fill_rows

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled without the JIT")
RUN = """
import numpy as np
from tierstore.kernels.slots import unique_in_order
keys, inverse = np.array([5, 5, 9]), np.empty(3, np.int32)
print(unique_in_order(keys, np.full(8, -1, np.int32), np.empty_like(keys), inverse, 1))
"""


def run(package: Path) -> subprocess.CompletedProcess[str]:
    changed = os.environ | {"PYTHONPATH": str(package), "NUMBA_CACHE_DIR": str(package / "numba")}
    return subprocess.run([sys.executable, "-P", "-c", RUN], env=changed, capture_output=True, text=True, check=True)


def test_kernels_are_compiled_once_and_again_when_a_helper_changes(tmp_path):
    """A copy of the package whose helper lies in another file than the kernel that it is compiled into. Times do not
    count: layers of images keep whole seconds."""
    source = Path(tierstore.__file__).parent
    for file in source.rglob("*.py"):
        target = tmp_path / "tierstore" / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    assert "compiling kernels that this machine has not used before" in run(tmp_path).stderr
    for file in (tmp_path / "tierstore").rglob("*.py"):
        os.utime(file, (0, 0))
    assert run(tmp_path).stderr == ""
    helper = tmp_path / "tierstore" / "kernels" / "hashing.py"
    helper.write_text(helper.read_text() + "\n")
    assert "compiling kernels that this machine has not used before" in run(tmp_path).stderr


def test_without_a_folder_to_keep_kernels_in_they_are_compiled_in_each_process():
    code = "import numba.core.caching as c; c._CacheLocator.ensure_cache_path = lambda _: open('/dev/null/no')\n" + RUN
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
    assert "set NUMBA_CACHE_DIR to a folder that this user can write to" in done.stderr


def _twice(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("step", ["_save_index", "_save_data", "_load_index"])
def test_a_kernel_that_cannot_be_kept_is_used(step, tmp_path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    jit._tell_once.cache_clear()
    made: list[Any] = [jit.kernel(_twice), jit.kernel(_twice)]
    monkeypatch.setattr(IndexDataCacheFile, step, fail)
    for compiled in made:
        assert compiled(21) == 42
    assert [record.message for record in caplog.records if str(tmp_path) in record.message]
    assert caplog.text.count("machine code cannot be kept there") == 1
    assert "No space left on device" in caplog.text


OF_A_MODULE_THAT_WENT = pickle.dumps(numba.__version__) + b"ctierstore.gone\nkernel\n."


@pytest.mark.parametrize("content", [b"", b"\x80\x04no pickle", OF_A_MODULE_THAT_WENT])
def test_an_index_of_kernels_that_cannot_be_read_is_written_again(content, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    jit._tell_once.cache_clear()
    for number in range(3):
        compiled: Any = jit.kernel(_twice)
        assert compiled(4) == 8
        assert bool(compiled.stats.cache_hits) == (number == 2)
        if not number:
            (index,) = tmp_path.rglob("*.nbi")
            index.write_bytes(content)
    assert "cannot be kept" not in caplog.text


def test_kernels_are_kept_in_the_cache_of_the_user_or_else_a_private_folder(tmp_path, monkeypatch):
    def kept_in(folder: Path) -> None:
        for hits in (0, 1):
            compiled: Any = jit.kernel(_twice)
            assert compiled(8) == 16
            assert sum(compiled.stats.cache_hits.values()) == hits
        assert Path(compiled.stats.cache_path).is_relative_to(folder / tierstore.__version__)

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    kept_in(tmp_path / "home" / ".cache" / "tierstore")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    kept_in(tmp_path / "xdg" / "tierstore")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/dev/null")
    private = tmp_path / f"tierstore-{os.geteuid()}"
    kept_in(private)
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)  # others could have put code there
    compiled: Any = jit.kernel(_twice)
    assert compiled(8) == 16
    assert not compiled.stats.cache_hits
    assert compiled.stats.cache_path is None


def test_a_kernel_is_claimed_by_one_process_and_others_wait_until_it_ends(tmp_path, caplog):
    (claimed, tell), (go, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with FirstUse(tmp_path).claimed("admit"), FirstUse(tmp_path).claimed("helper"):
            os.write(tell, b"!")
            os.read(go, 1)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
    os.read(claimed, 1)
    caplog.set_level(logging.INFO)
    first_use = FirstUse(tmp_path)
    for name, is_free in (("admit", False), ("look_up", True)):
        with first_use.claimed(name, wait=False) as is_mine:
            assert is_mine == is_free
    os.write(end, b"!")
    with first_use.claimed("admit") as is_mine:
        assert is_mine
    assert "compiling kernels that this machine has not used before" in caplog.text
    os.waitpid(child, 0)
    for descriptor in (claimed, tell, go, end):
        os.close(descriptor)


@pytest.mark.parametrize("stderr", [None, object(), "closed"], ids=["none", "no file", "closed"])
def test_compiling_needs_no_terminal(stderr, monkeypatch):
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(logging, "raiseExceptions", False)  # by handlers that other tests left
    monkeypatch.setattr(sys, "path", [*sys.path, Path("of a notebook")])
    first_use = FirstUse(None)
    first_use.on_start(SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=fill_rows)}))
    first_use.disown()
    assert gc.isenabled()


KILLED = f"""
import os, signal
{RUN}
from tierstore.kernels.jit import FIRST_USE
print(FIRST_USE._ahead.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_that_compiles_ahead_ends_with_its_parent(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    ahead = Path("/proc") / done.stdout.split()[-1]
    for _ in range(100):
        if not ahead.exists():
            return
        time.sleep(0.05)
    pytest.fail("it goes on")


def test_a_fork_while_a_thread_compiles_can_compile():
    begun, ended = threading.Event(), threading.Event()

    def compile_on() -> None:
        while not ended.is_set():
            numba.njit(lambda x: x + 1)(1)
            begun.set()

    (thread := threading.Thread(target=compile_on)).start()
    try:
        assert begun.wait(60)
        for _ in range(3):
            if not (child := os.fork()):
                signal.alarm(60)
                os._exit(numba.njit(lambda x: x * 2)(1))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    finally:
        ended.set()
        thread.join()
