"""Functions run in ranks: processes of a gloo group on this machine, one thread each, on cores of their own."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

_TIMEOUT: Final = timedelta(minutes=2)


def run_ranks(work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` returned in each rank, in order; raises what it raised in one."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        ProcessPoolExecutor(size, mp_context=context) as processes,
    ):
        futures = [processes.submit(_run, f"{folder}/meet", rank, size, work, arguments) for rank in range(size)]
        return [future.result() for future in futures]


def _run(meet: str, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[rank::size] or [cpus[rank % len(cpus)]])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        return work(*arguments)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def whole_machine(threads: int) -> Iterator[None]:
    """Within, this thread and those it starts may use all cores, and torch so many threads."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, own)
