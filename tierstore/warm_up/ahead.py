"""Compiling kernels before they are needed: by ``python ahead.py PARENT WORK PROCESSES``, which ``warm_up`` starts, and
the first process of a machine that must compile one.

One process finds out which kernels some work uses (a function of ``workload``), and for what types: it does the work
with kernels that run as plain Python and note their arguments. It is forked before kernels are imported, which decides
whether they are compiled; so this is a script. ``PROCESSES`` others compile them, each kernel in one.

Prints a line with the number of kernels, a character for each that was compiled, and a line for each folder that keeps
some.
"""

import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

_PROCESSES_MAX: Final = 8  # more would wait for the kernel that takes longest
Use = tuple[str, str, Any]  # module and name of a kernel, and numba's types of its arguments


def main(parent: str, work: str, processes: str) -> None:
    """Do it."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    from tierstore.system.signals import end_with

    end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # in plain Python hashes overflow, by intent
    import numba  # noqa: F401 - here, so that what is forked has it
    import torch  # noqa: F401

    read, write = os.pipe()
    _fork(lambda: os.write(write, pickle.dumps(_find_uses(work))))
    os.close(write)
    from tierstore.kernels.jit import FIRST_USE

    FIRST_USE.is_alone = True
    with os.fdopen(read, "rb") as file:
        uses: list[Use] = pickle.load(file)
    os.write(out, b"%d\n" % len(uses))
    children = [_fork(lambda: _compile(uses, out)) for _ in range(int(processes) - 1)]
    _compile(uses, out)
    failed = [os.waitpid(child, 0)[1] for child in children]
    if not any(failed):
        FIRST_USE.note_done()
    if work == "everything":  # some functions are only there where kernels are compiled
        before = FIRST_USE.compiled
        _do(work)
        os.write(out, b"+" * (FIRST_USE.compiled - before))
        folders = {_kernel(module, name).stats.cache_path for module, name, _ in uses}
        os.write(out, os.fsencode("\n".join(["", *sorted(folders), ""])))
    sys.exit(any(failed))


def _fork(work: Callable[[], object]) -> int:
    from tierstore.system.signals import end_with

    this = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            end_with(this)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def _do(work: str, done: Callable[[], None] = lambda: None) -> None:
    from tierstore.warm_up import workload

    with tempfile.TemporaryDirectory(prefix="tierstore-warm-up-", ignore_cleanup_errors=True) as folder:
        for number, part in enumerate(getattr(workload, work)()):
            part(Path(folder) / str(number))
            done()


def _find_uses(work: str) -> list[Use]:
    """The kernels that all parts of the work use first; those used last first."""
    import numba

    parts: list[list[Use]] = []
    used: dict[Use, None] = {}
    inside = threading.local()

    def keep_plain(**options: Any) -> Callable[[Any], Any]:
        def keep(function: Any) -> Any:
            @functools.wraps(function)
            def note(*args: Any) -> Any:
                if getattr(inside, "kernel", False):
                    return function(*args)
                used[function.__module__, function.__name__, tuple(map(numba.typeof, args))] = None
                inside.kernel = True
                try:
                    return function(*args)
                finally:
                    inside.kernel = False

            return function if options["no_cpython_wrapper"] else note  # helpers have none

        return keep

    def end_part() -> None:
        parts.append(list(used))
        used.clear()

    numba.config.DISABLE_JIT = True
    numba.njit = keep_plain
    _do(work, end_part)
    counts = Counter(use for part in parts for use in part)
    uses = dict.fromkeys(use for part in parts for use in reversed(part))
    return sorted(uses, key=lambda use: -counts[use])


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _compile(uses: list[Use], out: int) -> None:
    """Compile them, those last that another process is at."""
    from tierstore.kernels.jit import FIRST_USE

    for wait in (False, True):
        left = []
        for module, name, types in uses:
            with FIRST_USE.claimed(f"{module}.{name}", wait=wait) as is_mine:
                if is_mine:
                    before = FIRST_USE.compiled
                    _kernel(module, name).compile(types)
                    os.write(out, b"+" * (FIRST_USE.compiled - before))
                else:
                    left.append((module, name, types))
        uses = left


class WarmedUp(NamedTuple):
    """What ``warm_up`` found and did.

    Attributes:
        compiled: kernels that were not there, each for some types of arguments.
        seconds: it took.
        folder: where machine code is kept.
        size_bytes: of the kernels' files.
    """

    compiled: int
    seconds: float
    folder: Path
    size_bytes: int


def warm_up(*, progress: Callable[[int, int], None]) -> WarmedUp:
    """Compile all kernels that training and serving on this machine's CPU use, on all its processors. ``progress``:
    called with the kernels compiled so far, and how many are needed. TierstoreError: there is no folder to keep machine
    code in, or kernels are not compiled at all."""
    from ..errors import TierstoreError
    from ..kernels import jit
    from ..kernels.threads import default_threads

    if not jit.JIT_ENABLED:
        raise TierstoreError("NUMBA_DISABLE_JIT is set: kernels run as plain Python; unset it to compile them")
    if jit.FOLDER is None:
        raise TierstoreError("nothing compiled; set NUMBA_CACHE_DIR to a folder that this user can write to")
    began, done = time.monotonic(), 0
    with jit.start("everything", min(default_threads(), _PROCESSES_MAX), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            total = int(process.stdout.readline() or 0)
            while process.stdout.read(1) == b"+":
                done += 1
                progress(done, max(done, total))
            folders = process.stdout.read().decode().splitlines()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise TierstoreError(f"a process that compiles kernels ended with status {process.returncode}; see above")
    files = [file for folder in folders for file in Path(folder).glob("*.nb[ic]")]
    where, size_bytes = Path(os.path.commonpath(folders)), sum(file.stat().st_size for file in files)
    return WarmedUp(done, time.monotonic() - began, where, size_bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
