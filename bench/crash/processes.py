"""Processes that are forked from this one, report in lines of JSON, and may be killed at any instant."""

import contextlib
import ctypes
import faulthandler
import gc
import json
import math
import os
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tierstore.kernels.jit import FIRST_USE

__all__ = ["Ending", "Kill", "Process", "fork", "may_make_namespaces"]

TIME_LIMIT_S: Final = 60.0
"""For one process, or for what is waited for; what takes longer hangs."""
_CLONE_NEWPID: Final = 0x20000000
_READ_BYTES: Final = 1 << 16
_libc: Final = ctypes.CDLL(None, use_errno=True)
Body = Callable[[Callable[..., None]], None]

# A process that helps to compile kernels is waited for by a thread, and there may be none where processes are forked.
FIRST_USE.is_alone = True


def may_make_namespaces() -> bool:
    """Whether a process of this user may have a PID namespace of its own."""
    child = os.fork()
    if not child:
        os._exit(_libc.unshare(_CLONE_NEWPID) != 0)
    return os.waitpid(child, 0)[1] == 0


class Process:
    """Runs ``body(report)`` in a process of its own, until it returns or is killed.

    What it reports, each with the time it did ("at", in seconds), or an error that it ends with ("failed"), is in
    ``reports``, as far as ``listen`` has heard it.

    Args:
        stacks: the file to which a process that hangs writes where each of its threads stands, before it ends.
        in_namespace: in a PID namespace of its own.
    """

    def __init__(self, name: str, body: Body, *, stacks: Path | None = None, in_namespace: bool = False) -> None:
        assert threading.active_count() == 1, "a lock that another thread holds would stay locked after a fork"
        self.name = name
        self.reports: list[dict[str, Any]] = []
        self.in_namespace = in_namespace
        self.status = 0
        self._rest = b""
        self._reader, writer = os.pipe()
        gc.freeze()
        self.started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries keep beside Python's
            self._child = os.fork()
        if not self._child:
            os.close(self._reader)
            _run(body, writer, stacks, in_namespace)
        os.close(writer)
        os.set_blocking(self._reader, False)
        self.pid = self.wait_for("pid")["pid"]

    def listen(self, seconds: float | None = 0.0) -> bool:
        """Take in what was reported, after waiting for it for so long; False at the end of the process."""
        select.select([self._reader], [], [], seconds)
        while True:
            try:
                part = os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                return True
            if not part:
                return False
            *lines, self._rest = (self._rest + part).split(b"\n")
            self.reports += map(json.loads, lines)

    def wait_for(self, label: str) -> dict[str, Any]:
        """The first report of that name; RuntimeError if the process ends, or takes too long, without it."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while True:
            is_alive = self.listen(0.05)
            for report in self.reports:
                if report["label"] in (label, "failed"):
                    if report["label"] == label:
                        return report
                    raise RuntimeError(report["words"])
            if not is_alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} {'hung' if is_alive else 'ended'} before it reported {label!r}")

    def of(self, label: str) -> list[dict[str, Any]]:
        """The reports of that name, so far."""
        return [report for report in self.reports if report["label"] == label]

    def join(self) -> None:
        """Wait for the end; RuntimeError if it takes too long."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while self.listen(0.05):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} hung")
        self._reap()

    def kill(self) -> None:
        """End it by SIGKILL, wherever it stands, and take in its last words. Again is fine."""
        if self._reader >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            while self.listen(TIME_LIMIT_S):
                pass
            self._reap()

    def _reap(self) -> None:
        os.close(self._reader)
        self._reader = -1
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def _run(body: Body, writer: int, stacks: Path | None, in_namespace: bool) -> None:
    """The child's part; does not return."""

    def report(label: str, **values: Any) -> None:
        os.write(writer, json.dumps({"label": label, "at": time.monotonic(), **values}).encode() + b"\n")

    if in_namespace:
        _libc.unshare(_CLONE_NEWPID)
    inner = os.fork() if in_namespace else 0
    if inner:
        report("pid", pid=inner)
        os.close(writer)
        os.waitpid(inner, 0)
        os._exit(0)
    status = 1
    try:
        if not in_namespace:
            report("pid", pid=os.getpid())
        if stacks is not None:
            file = open(stacks, "w")  # noqa: SIM115 - open until the end of the process
            faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True, file=file)
        report("start")
        body(report)
        status = 0
    except BaseException:
        report("failed", words=traceback.format_exc())
    finally:
        os._exit(status)


class Kill(NamedTuple):
    """SIGKILL so many seconds after the ``times``-th report ``label``; "start" is the fork."""

    label: str
    times: int
    seconds: float


class Ending(NamedTuple):
    """What came of a process.

    Attributes:
        how: "killed" by SIGKILL, "ended" by itself, or "failed": an error, another signal, or a hang.
        reports: what it reported, in order.
        words: of a failure.
    """

    how: Literal["killed", "ended", "failed"]
    reports: list[dict[str, Any]]
    words: str = ""

    def last(self, label: str) -> dict[str, Any] | None:
        """The last report of that name."""
        return next((report for report in reversed(self.reports) if report["label"] == label), None)


def fork(body: Body, stacks: Path, kill: Kill | None = None) -> Ending:
    """Run ``body(report)`` in a process, kill it when its time comes, and wait for its end; ``stacks`` as there."""
    process = Process("a process", body, stacks=stacks)
    deadline, is_alive = math.inf, True
    while is_alive and time.monotonic() < deadline:
        if kill is not None and deadline == math.inf and len(process.of(kill.label)) >= kill.times:
            deadline = (process.started if kill.label == "start" else time.monotonic()) + kill.seconds
        is_alive = process.listen(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    if is_alive:
        process.kill()
    else:
        process.join()
    return _ending(process, stacks)


def _ending(process: Process, stacks: Path) -> Ending:
    if failed := process.of("failed"):
        return Ending("failed", process.reports, failed[-1]["words"])
    if process.status == -signal.SIGKILL:
        return Ending("killed", process.reports)
    if process.status == 0:
        return Ending("ended", process.reports)
    words = f"ended with status {process.status}"
    if hung := stacks.read_text():
        words = f"hung for {TIME_LIMIT_S} s: see {stacks}\n{hung}"
    return Ending("failed", process.reports, words)
