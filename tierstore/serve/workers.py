"""Several processes that share the ports, each with its own part of the memory."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Final, cast

from ..errors import TierstoreError
from ..system.signals import Flag, end_with, handlers_restored
from .config import ServeConfig
from .logs import configure
from .program import Ports, run
from .rest.server import listen

_LOG: Final = logging.getLogger("tierstore.serve")
_POLL_SECONDS: Final = 0.2


def share_of(size: int | str, workers: int) -> int | str:
    """One worker's part of a budget, in the form it was given."""
    if isinstance(size, int):
        return size // workers
    text = size.strip()
    if text.isdecimal():
        return int(text) // workers
    number = text[: len(text) - len(text.lstrip("0123456789._"))]
    return f"{float(number) / workers:.6f}{text[len(number) :]}"


def worker_config(config: ServeConfig, index: int) -> ServeConfig:
    """The settings of one of several processes: its part of each budget, and a file of its own to record in, of
    NAME.npz NAME.0.npz and so on."""
    if config.workers == 1:
        return config

    def part(each: Any) -> Any:
        stem, suffix = os.path.splitext(each.record)
        record = each.record and f"{stem}.{index}{suffix}"
        return replace(each, ddr=each.ddr and share_of(each.ddr, config.workers), record=record)

    return replace(cast(ServeConfig, part(config)), stores=tuple(map(part, config.stores)))


def recording_paths(config: ServeConfig) -> list[str]:
    """The file of each process, and of each store, to record in."""
    every = [each for index in range(config.workers) for each in worker_config(config, index).by_store().values()]
    return [each.record for each in every if each.record]


def run_workers(config: ServeConfig, *, on_ready: Callable[[Ports], Any]) -> int:
    """Serve with ``config.workers`` processes until SIGTERM or Ctrl-C; returns the exit status. If one ends by
    itself, all are stopped, and the status is 1: the supervisor of the command starts it again. OSError: a port
    is taken."""
    configure(config.log_level.upper())
    context = multiprocessing.get_context("spawn")
    stopping = Flag()
    processes: list[BaseProcess] = []
    waited_for = [context.Event() for _ in range(config.workers)]
    ended = 0
    for port in (config.port, config.grpc_port):
        if port >= 0:
            for listener in listen(config.host, port):  # alone: workers of two servers would share it, unseen
                listener.close()
    with _signals(stopping, processes):
        for index in range(config.workers):
            arguments = (worker_config(config, index), index, waited_for[index], os.getpid())
            processes.append(context.Process(target=_work, args=arguments, name=f"tierstore-worker-{index}"))
            processes[index].start()
        while not ended and not stopping.wait(_POLL_SECONDS):
            for index, process in enumerate(processes):
                if not process.is_alive():
                    ended = 1
                    _LOG.error("worker %d ended (exit status %s): all are stopped", index, process.exitcode)
            if waited_for and all(each.is_set() for each in waited_for):
                waited_for = []
                on_ready(Ports(config.port, config.grpc_port, config.admin_port))
        _stop(processes, config.grace_seconds)
    return ended


def _work(config: ServeConfig, index: int, ready: Any, parent: int) -> None:
    """One worker. A second signal may be its parent's, which passes each on: it is not taken for impatience."""
    end_with(parent, signal.SIGTERM)
    try:
        run(config, worker=index, on_ready=lambda _: ready.set(), is_patient=True)
    except (TierstoreError, ValueError, OSError) as error:
        _LOG.error("%s", error)
        sys.exit(1)


def _stop(processes: list[BaseProcess], grace_seconds: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_seconds + 10
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        process.kill()
        process.join()


@contextlib.contextmanager
def _signals(stopping: Flag, processes: Sequence[BaseProcess]) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    with handlers_restored(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stopping.set())
        signal.signal(signal.SIGHUP, pass_on)
        yield
