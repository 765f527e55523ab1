"""Processes that are forked from this one, report in lines, and may be killed at any instant."""

import contextlib
import faulthandler
import gc
import json
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

__all__ = ["Ending", "Kill", "fork"]

TIME_LIMIT_S: Final = 60
"""For one process; what takes longer hangs."""
_READ_BYTES: Final = 1 << 16


class Kill(NamedTuple):
    """SIGKILL so many seconds after the ``times``-th report ``label``; "start" is the fork."""

    label: str
    times: int
    seconds: float


class Ending(NamedTuple):
    """What came of a process.

    Attributes:
        how: "killed" by SIGKILL, "ended" by itself, or "failed": an error, another signal, or a hang.
        reports: what it reported, in order, each with the time it did: "at", in seconds.
        words: of a failure.
    """

    how: Literal["killed", "ended", "failed"]
    reports: list[dict[str, Any]]
    words: str = ""

    def last(self, label: str) -> dict[str, Any] | None:
        """The last report of that name."""
        return next((report for report in reversed(self.reports) if report["label"] == label), None)


def fork(body: Callable[[Callable[..., None]], None], stacks: Path, kill: Kill | None = None) -> Ending:
    """Run ``body(report)`` in a forked process and wait for its end.

    Args:
        stacks: the file to which a process that hangs writes where each of its threads stands.
    """
    assert threading.active_count() == 1, "a lock that another thread holds would stay locked after a fork"
    reader, writer = os.pipe()
    gc.freeze()
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries keep beside Python's
        child = os.fork()
    if not child:
        os.close(reader)
        _run(body, writer, stacks)
    os.close(writer)
    try:
        lines = _watch(child, reader, kill, started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _ending(status, [json.loads(line) for line in lines], stacks)


def _run(body: Callable[[Callable[..., None]], None], writer: int, stacks: Path) -> None:
    """The child's part; does not return."""

    def report(label: str, **values: Any) -> None:
        os.write(writer, json.dumps({"label": label, "at": time.monotonic(), **values}).encode() + b"\n")

    status = 1
    try:
        file = open(stacks, "w")  # noqa: SIM115 - open until the end of the process
        faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True, file=file)
        report("start")
        body(report)
        status = 0
    except BaseException:
        report("failed", words=traceback.format_exc())
    finally:
        os._exit(status)


def _watch(child: int, reader: int, kill: Kill | None, started: float) -> list[bytes]:
    """The lines the child wrote until its end; it is killed when its time comes."""
    data, deadline, seen = b"", None, 0
    if kill is not None and kill.label == "start":
        deadline = started + kill.seconds
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], wait)[0]:
            os.kill(child, signal.SIGKILL)
            deadline = None
            continue
        part = os.read(reader, _READ_BYTES)
        if not part:
            return data.splitlines()
        data += part
        if kill is not None and deadline is None and seen < kill.times:
            seen = data.count(f'{{"label": "{kill.label}"'.encode())
            if seen >= kill.times:
                deadline = time.monotonic() + kill.seconds


def _ending(status: int, reports: list[dict[str, Any]], stacks: Path) -> Ending:
    failed = [report["words"] for report in reports if report["label"] == "failed"]
    if failed:
        return Ending("failed", reports, "\n".join(failed))
    if status == -signal.SIGKILL:
        return Ending("killed", reports)
    if status == 0:
        return Ending("ended", reports)
    words = f"ended with status {status}"
    if hung := stacks.read_text():
        words = f"hung for {TIME_LIMIT_S} s: see {stacks}\n{hung}"
    return Ending("failed", reports, words)
