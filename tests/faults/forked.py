"""Processes that are forked from this one, report in lines of JSON, and may be killed at any instant."""

import faulthandler
import gc
import json
import os
import select
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tierstore.kernels.jit import FIRST_USE

__all__ = ["Ending", "fork"]

_HANGS_SECONDS: Final = 60.0

# A process that helps to compile kernels is waited for by a thread, and there may be none where processes are forked.
FIRST_USE.is_alone = True


class Ending(NamedTuple):
    """How a process ended, and what it reported, in order."""

    how: Literal["killed", "ended", "failed"]
    reports: list[dict[str, Any]]
    words: str = ""
    """Of a failure: an error, another signal, or a hang."""

    def last(self, label: str) -> dict[str, Any] | None:
        return next((report for report in reversed(self.reports) if report["label"] == label), None)


def fork(body: Callable[[Callable[..., None]], None], stacks: Path, kill_after: float | None = None) -> Ending:
    """Run ``body(report)`` in a process, kill it after so many seconds, and wait for its end.

    Args:
        stacks: the file to which a process that hangs writes where each of its threads stands, before it ends.
    """
    own = {each.name for each in threading.enumerate()} - {"tierstore-dropped"}  # which holds none while it waits
    assert len(own) == 1, f"a lock that one of {own} holds would stay locked after a fork"
    reader, writer = os.pipe()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries keep beside Python's
        child = os.fork()
    if not child:
        os.close(reader)
        _run(body, writer, stacks)
    os.close(writer)
    if kill_after is not None:
        select.select([watched := os.pidfd_open(child)], [], [], kill_after)
        os.kill(child, signal.SIGKILL)
        os.close(watched)
    with open(reader) as lines:  # a kill loses a line whole or not at all
        reports = [json.loads(line) for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    failed = next((report["words"] for report in reports if report["label"] == "failed"), "")
    if not failed and status in (0, -signal.SIGKILL):
        return Ending("ended" if status == 0 else "killed", reports)
    return Ending("failed", reports, failed or f"ended with status {status}: {stacks.read_text()}")


def _run(body: Callable[[Callable[..., None]], None], writer: int, stacks: Path) -> None:
    """The child's part; does not return."""

    def report(label: str, **values: Any) -> None:
        os.write(writer, json.dumps({"label": label, **values}).encode() + b"\n")

    status = 1
    try:
        file = open(stacks, "w")  # noqa: SIM115 - open until the end of the process
        faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True, file=file)
        body(report)
        status = 0
    except BaseException:
        report("failed", words=traceback.format_exc())
    finally:
        os._exit(status)
