"""Tests that need a process of their own: with less memory, other rights, or an end by SIGKILL."""

import atexit
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.data import ROOT

PREAMBLE = """
import errno, os, resource, signal, sys, time
from pathlib import Path
import numpy as np
import torch
import tierstore
from tierstore import *
from tierstore import errors

def table_config(**changes):
    fields = {"name": "t", "num_embeddings": 2000, "embedding_dim": 16, "init": tierstore.init.Constant(0.5)}
    return tierstore.TableConfig(**{**fields, **changes})

def forked(function, *arguments):
    '''Run it in a fork, which shares what was imported; a line says how it ended.'''
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            print("ok", function(*arguments), flush=True)
        except BaseException as error:
            print(type(error).__name__, str(error)[:400].replace("\\n", " "), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        print("ended with", status, flush=True)

def limit_data(extra_bytes):
    '''Let the process take so much more memory of its own; maps of files are not counted.'''
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + extra_bytes,) * 2)
"""


FORKING = """
import json, select
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    if not select.select([watched := os.pidfd_open(child)], [], [], request["timeout"])[0]:
        os.kill(child, signal.SIGKILL)
    os.close(watched)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(name, os.O_RDWR), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv[:] = ["-c", *request["arguments"]]
exec(compile(request["code"], "<string>", "exec"))
"""
"""Goes on after the preamble: runs code in forks, one after another, which spares each the imports."""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore::DeprecationWarning"}


def start(
    code: str, *arguments: object, changes: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """A Python process that runs ``code`` after the preamble. ``changes``: of its environment."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment() | (changes or {}),
        **options,
    )


@functools.cache
def _forking() -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREAMBLE + FORKING]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())

    @atexit.register
    def end() -> None:
        with made:  # closes its pipes
            made.kill()

    return made


def run(code: str, *arguments: object, timeout: float = 200, **options: Any) -> str:
    """What such a process prints; without options of ``start`` it is a fork of a process that has run the preamble."""
    if options:
        process = start(code, *arguments, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        status = process.returncode
    else:
        with tempfile.TemporaryDirectory() as folder:
            printed, told = Path(folder, "out"), Path(folder, "err")
            printed.touch()
            told.touch()
            request = {
                "code": textwrap.dedent(code), "arguments": [*map(str, arguments)], "environment": _environment(),
                "folder": os.getcwd(), "out": str(printed), "err": str(told), "timeout": timeout,
            }  # fmt: skip
            forking = _forking()
            print(json.dumps(request), file=forking.stdin, flush=True)
            status = int(forking.stdout.readline())
            out, err = printed.read_text(), told.read_text()
    assert status == 0, f"ended with {status}\n{out[-2000:]}\n{err[-4000:]}"
    return out


def make_store(folder: Path) -> None:
    """A store with one table ``t`` of 2000 rows, all 3.0, committed once with extra and a tensor."""
    import torch

    import tierstore

    config = tierstore.TableConfig(name="t", num_embeddings=2000, embedding_dim=16, init=tierstore.init.Constant(0.5))
    with tierstore.open(folder, ddr="2MiB", threads=1) as store:
        store.create_table(config).write(torch.arange(2000), torch.full((2000, 16), 3.0))
        store.commit(extra={"step": 1}, tensors={"w": torch.ones(3)})


def fork(
    body: Callable[[Callable[..., None]], None], *, kill_after: float | None = None
) -> tuple[list[dict[str, Any]], int]:
    """What ``body(report)`` reports in a forked process, and how that ends: its status, or less than 0 by a signal.
    ``report(label, **values)`` is one write, so that a kill loses it whole or not at all."""
    reader, writer = os.pipe()
    gc.freeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that libraries keep beside Python's
        child = os.fork()
    if not child:

        def report(label: str, **values: Any) -> None:
            os.write(writer, json.dumps({"label": label, **values}).encode() + b"\n")

        try:
            body(report)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    if kill_after is not None:
        select.select([watched := os.pidfd_open(child)], [], [], kill_after)
        os.kill(child, signal.SIGKILL)
        os.close(watched)
    with open(reader) as lines:
        reports = [json.loads(line) for line in lines]
    return reports, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
