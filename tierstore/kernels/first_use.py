"""The first time that a machine compiles kernels: processes share the work.

numba compiles one kernel at a time in a process. So a process that must compile starts another one, which compiles what
the rest of a first run needs, last things first (``warm_up/ahead.py``). A kernel is compiled by the process that has
locked it; others wait, then load it from the cache.
"""

import atexit
import contextlib
import fcntl
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from numba.core import event

from ..system.processes import child_options
from .threads import default_threads

_LOG: Final = logging.getLogger("tierstore")
_SCRIPT: Final = Path(__file__).parents[1] / "warm_up" / "ahead.py"

_POLL_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 60


class FirstUse(event.Listener):  # type: ignore[misc, unused-ignore]
    """Listens to numba's compiler. ``folder``: where machine code is kept, with a ``stamp`` of what it depends on.
    ``compiled`` counts kernels that this process compiled; ``is_alone``: it starts no other process."""

    def __init__(self, folder: Path | None, stamp: str = "") -> None:
        self._locks = folder and folder / "tierstore.lock"
        self._done = folder and folder / "tierstore.done"
        self._stamp = stamp
        self._is_locking = False
        self._outermost: Any = None
        self._collects = False
        self._ahead: subprocess.Popen[bytes] | None = None
        self._is_logged = False
        self.compiled = 0
        self.is_alone = False

    @contextlib.contextmanager
    def claimed(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """While entered, no other process compiles the kernel. Without ``wait``: gives whether that is so."""
        if self._locks is None or self._is_locking:
            yield True
            return
        with contextlib.ExitStack() as stack:
            is_mine = True
            with contextlib.suppress(OSError):  # no room for it, or a file system without locks
                descriptor = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)  # which unlocks
                is_mine = self._lock(descriptor, zlib.crc32(name.encode()), wait=wait)
            self._is_locking = is_mine
            stack.callback(setattr, self, "_is_locking", False)
            yield is_mine

    def _lock(self, descriptor: int, place: int, *, wait: bool) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            if not wait:
                return False
            self._log()
            self._wait(descriptor, place)
        return True

    @staticmethod
    def _wait(descriptor: int, place: int) -> None:
        """For the process that compiles it, but not for ever: it may have been stopped, and only work is saved."""
        for _ in range(int(_PATIENCE_SECONDS / _POLL_SECONDS)):
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return

    def on_start(self, event: Any) -> None:
        """numba begins to compile a function: a kernel, or what it calls."""
        dispatcher = event.data["dispatcher"]
        if self._outermost is not None or not str(dispatcher.py_func.__module__).startswith("tierstore."):
            return
        self._outermost = dispatcher
        self._collects = gc.isenabled()
        gc.disable()  # nine tenths of what the compiler makes lives until it ends
        self._log()
        if not self.is_alone and (self._ahead is None or self._ahead.returncode):  # it ends with a thread
            self._begin()

    def on_end(self, event: Any) -> None:
        """And is done, or failed."""
        if event.data["dispatcher"] is self._outermost:
            self._outermost = None
            self.compiled += 1
            if self._collects:
                gc.enable()

    def note_done(self) -> None:
        """All that a first run needs is compiled: later processes that compile something else start no other one."""
        if self._done is not None:
            with contextlib.suppress(OSError):
                self._done.write_text(self._stamp)

    def _is_done(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._done is not None and self._done.read_text() == self._stamp
        return False

    def disown(self) -> None:
        """Forget, in a forked process, what its parent was about to compile."""
        if self._outermost is not None and self._collects:
            gc.enable()
        self._outermost = None

    def _log(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            # A warning where logging was not set up, which would show nothing less.
            log = _LOG.info if _LOG.hasHandlers() else _LOG.warning
            log(
                "compiling kernels that this machine has not used before (some seconds; later runs load them from disk)"
            )

    def _begin(self) -> None:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of processes that torchrun starts
        is_one = default_threads() == 1 or not is_first or hasattr(sys, "frozen")
        if self._locks is None or self._done is None or is_one or self._is_done():
            self.is_alone = True
            return
        with contextlib.suppress(OSError):
            self._done.unlink(missing_ok=True)  # it is of other sources, whose kernels are replaced now
        try:
            self._ahead = start("first_run", 1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            threading.Thread(target=self._ahead.wait, daemon=True).start()
        except Exception:
            self.is_alone = True
            return
        atexit.register(_end, self._ahead, os.getpid())


def start(work: str, processes: int, **options: Any) -> "subprocess.Popen[bytes]":
    """Start ``warm_up/ahead.py``; it ends with the thread that started it."""
    command = [sys.executable, "-P", str(_SCRIPT), str(os.getpid()), work, str(processes)]
    return subprocess.Popen(command, **child_options(), **options)


def _end(process: "subprocess.Popen[bytes]", parent: int) -> None:
    if os.getpid() == parent:
        process.kill()
        process.communicate()
