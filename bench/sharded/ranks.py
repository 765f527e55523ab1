"""Functions run in ranks: processes of a gloo group on this machine, one thread each, on cores of their own."""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

_TIMEOUT: Final = timedelta(minutes=2)


def run_ranks(work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` returned in each rank, in order.

    Raises:
        whatever it raised in one.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            with ProcessPoolExecutor(size, mp_context=context) as processes:
                futures = [
                    processes.submit(_run, str(Path(folder) / "meet"), rank, size, work, arguments)
                    for rank in range(size)
                ]
                return [future.result() for future in futures]
        finally:
            del os.environ["OMP_NUM_THREADS"]
            os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}


def _run(meet: str, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

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
    import torch

    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, own)
