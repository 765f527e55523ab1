"""``tierstore compile``, and that what is compiled ahead is what runs use."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tierstore import cli
from tierstore.kernels import jit
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.warm_up import ahead

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled without the JIT")
FOUND = """
import ahead, warnings
warnings.simplefilter("ignore")
print([(module, name, str(types)) for module, name, types in ahead._find_uses("first_run")])
"""
USED = """
import ahead, threading
from tierstore.kernels import jit
used, compiles, within = set(), jit._Kernel.compile, threading.local()
def note(self, types):
    if getattr(within, "kernel", False):
        return compiles(self, types)
    used.add((self.py_func.__module__, self.py_func.__name__, str(tuple(types))))
    within.kernel = True
    try:
        return compiles(self, types)
    finally:
        within.kernel = False
jit._Kernel.compile = note
ahead._do("first_run")
print(list(used))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(ahead.__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def test_what_is_found_without_compiling_is_what_a_compiled_run_uses() -> None:
    found, used = (set(ast.literal_eval(run(code).stdout)) for code in (FOUND, USED))
    # A callback of pool.direct has it, and may be on disk.
    assert {name for _, name, _ in found - used} <= {"look_up"}
    assert {module for module, *_ in used - found} == {"tierstore.pool.direct"}  # only there where kernels are compiled
    assert len(found) > 30
    assert not [name for _, name, _ in found if name == "gather"], "a new store has no row to be gathered"


def test_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "slots.look_up.1.nbc").write_bytes(bytes(2048))
    folder = tmp_path / "kernels"
    holds = f"; {folder} holds 2.0 KiB of machine code\n"
    for code, said in (
        (f"print('3\\n+++\\n{folder}')", f"compiled 3 kernels in 0 s{holds}"),
        (f"print('3\\n\\n{folder}')", f"nothing to do{holds}"),
        ("import sys; sys.exit(3)", "ended with status 3"),
    ):
        script = [sys.executable, "-c", code]
        monkeypatch.setattr(jit, "start", lambda *_, s=script, **options: subprocess.Popen(s, **options))
        assert cli.main(["compile"]) == ("status" in said)
        shown = capsys.readouterr()
        assert said in shown.out + shown.err
    monkeypatch.setattr(jit, "FOLDER", None)
    assert cli.main(["compile"]) == 1
    assert "set NUMBA_CACHE_DIR to a folder that this user can write to" in capsys.readouterr().err


def test_after_a_first_run_no_process_looks_for_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock(side_effect=OSError)
    monkeypatch.setattr(jit, "start", start)
    monkeypatch.setattr(jit, "default_threads", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    jit.FirstUse(tmp_path, "of these sources").note_done()
    for stamp, expected in (("of these sources", []), ("of others", ["first_run"])):
        jit.FirstUse(tmp_path, stamp)._begin()
        assert [call.args[0] for call in start.call_args_list] == expected
