"""Processes that share a store for a while: forked from this one, some in a PID namespace of their own."""

import contextlib
import ctypes
import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Peer", "may_make_namespaces"]

TIME_LIMIT_S: Final = 60.0
_CLONE_NEWPID: Final = 0x20000000
_READ_BYTES: Final = 1 << 16
_libc: Final = ctypes.CDLL(None, use_errno=True)


def may_make_namespaces() -> bool:
    """Whether a process of this user may have a PID namespace of its own."""
    child = os.fork()
    if not child:
        os._exit(_libc.unshare(_CLONE_NEWPID) != 0)
    return os.waitpid(child, 0)[1] == 0


class Peer:
    """Runs ``body(report)`` in a process of its own, until it returns or is killed.

    What it reports, or an error that it ends with, is in ``reports``, as far as ``listen`` has heard it.
    """

    def __init__(self, name: str, body: Callable[[Callable[..., None]], None], *, in_namespace: bool) -> None:
        self.name = name
        self.reports: list[dict[str, Any]] = []
        self.in_namespace = in_namespace
        self._rest = b""
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries keep beside Python's
            self._child = os.fork()
        if not self._child:
            os.close(self._reader)
            _run(body, writer, in_namespace)
        os.close(writer)
        os.set_blocking(self._reader, False)
        self.pid = self.wait_for("pid")["pid"]

    def listen(self, seconds: float = 0.0) -> bool:
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
        os.waitpid(self._child, 0)


def _run(body: Callable[[Callable[..., None]], None], writer: int, in_namespace: bool) -> None:
    """The child's part; does not return."""
    if in_namespace:
        _libc.unshare(_CLONE_NEWPID)
        inner = os.fork()
        if inner:
            _say(writer, "pid", pid=inner)
            os.close(writer)
            os.waitpid(inner, 0)
            os._exit(0)
    else:
        _say(writer, "pid", pid=os.getpid())

    def report(label: str, **values: Any) -> None:
        _say(writer, label, **values)

    try:
        body(report)
    except BaseException:
        report("failed", words=traceback.format_exc())
    finally:
        os._exit(0)


def _say(writer: int, label: str, **values: Any) -> None:
    os.write(writer, json.dumps({"label": label, **values}).encode() + b"\n")
