"""``tierstore compile``: every kernel compiled at once."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import TierstoreError
from ..kernels.jit import FOLDER, JIT_ENABLED, start
from ..kernels.threads import default_threads

_PROCESSES_MAX: Final = 8  # more would wait for the kernel that takes longest


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
    if not JIT_ENABLED:
        raise TierstoreError("NUMBA_DISABLE_JIT is set: kernels run as plain Python; unset it to compile them")
    if FOLDER is None:
        raise TierstoreError("nothing compiled; set NUMBA_CACHE_DIR to a folder that this user can write to")
    began, done = time.monotonic(), 0
    with start("everything", min(default_threads(), _PROCESSES_MAX), stdout=subprocess.PIPE) as process:
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
