"""Processes that a benchmark owns: asked line by line, looked at, ended."""

import contextlib
import multiprocessing
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ClassVar, Final, ParamSpec, Self, TypeVar

import psutil

from .data import ROOT

HOST: Final = "127.0.0.1"
_LINE_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 120.0
P = ParamSpec("P")
T = TypeVar("T")


def in_child(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``work(*args)`` in a fresh process; ``work`` is a function of a module, and all that goes over can be pickled."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *args, **kwargs).result()


class Child:
    """A process; leaving a ``with`` block ends it. What it writes to standard error is appended to the log, if there is
    one. It ends when its standard input does, unless it ``needs_signal``."""

    needs_signal: ClassVar[bool] = False

    def __init__(self, command: Sequence[object], *, log: Path | None = None, cwd: Path = ROOT) -> None:
        self._log, self._text, pipe = log, b"", subprocess.PIPE
        with contextlib.nullcontext() if log is None else log.open("ab") as errors:
            words = [*map(str, command)]
            self.process = subprocess.Popen(words, cwd=cwd, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0)
        self._watched = psutil.Process(self.process.pid)

    def line(self) -> str:
        """What it prints next; RuntimeError if it ended, or printed nothing for five minutes."""
        assert self.process.stdout is not None
        descriptor, end = self.process.stdout.fileno(), time.monotonic() + _LINE_SECONDS
        while b"\n" not in self._text:
            can_read, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            part = os.read(descriptor, 1 << 16) if can_read else b""
            if not part:
                where = "its messages above" if self._log is None else f"its log, {self._log}"
                raise RuntimeError(f"{self.process.args!r} printed no line: see {where}")
            self._text += part
        line, self._text = self._text.split(b"\n", 1)
        return line.decode()

    def ask(self, text: str) -> str:
        """Its next line, after it was given one."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        return self.line()

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Ask it to end, and wait; RuntimeError if it ends badly."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.needs_signal:
            self.process.terminate()
        status = self.process.wait(_STOP_SECONDS)
        self._close()
        if status > 0:
            raise RuntimeError(f"{self.process.args!r} ended with {status}; log: {self._log}")

    def kill(self) -> None:
        """End it at once, as a machine's fault would."""
        self.process.kill()
        self.process.wait(_STOP_SECONDS)
        self._close()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, trace: object) -> None:
        if self.process.poll() is not None:
            self._close()
        elif error is None:
            self.stop()
        else:
            self.kill()
