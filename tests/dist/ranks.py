"""Runs functions in ranks: processes of a gloo group, forked from one that has imported everything once."""

import functools
import importlib
import itertools
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tierstore
from bench.data import ROOT
from tierstore import optim
from tierstore.ids.id_map import owners_of

DIED = 9
"""Exit status of a rank that ends itself in a test."""


def run(
    work: Callable[..., Any],
    size: int,
    folder: Path,
    *arguments: Any,
    statuses: Sequence[int] = (),
    timeout_s: float = 60,
) -> list[Any]:
    """What ``work(*arguments)``, a function of a module here, returned in each rank, in order; None where it did not.
    ``statuses``: with which each rank must end; default: 0. ``timeout_s``: of the group."""
    path = folder / f"run-{len(list(folder.glob('run-*')))}"
    path.mkdir()
    called = Path(work.__code__.co_filename).stem, work.__name__, size, timeout_s, arguments
    (path / "call").write_bytes(pickle.dumps(called))
    server = _server()
    print(path, file=server.stdin, flush=True)
    ended = [int(status) for status in server.stdout.readline().split()]
    told = "".join(each.read_text() for each in path.glob("*.error"))
    assert ended == list(statuses or [0] * size), f"{ended}\n{told}"
    results = [path / str(rank) for rank in range(size)]
    return [pickle.loads(each.read_bytes()) if each.exists() else None for each in results]


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Ends with this process, which closes its input."""
    # CUDA that was asked for in this process could not be used in ranks; NVML may be asked.
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment = {**os.environ, **own}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.dist.ranks"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def as_torchrun_starts(port: int) -> int:
    """Leave the group, with the environment that torchrun gives a rank; the rank."""
    rank = dist.get_rank()
    take_torchruns_environment(port)
    dist.destroy_process_group()
    return rank


def take_torchruns_environment(port: int = 0) -> None:
    """That of a rank whose agent's store is at the port."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}


def _fork(
    path: Path, rank: int, size: int, timeout: timedelta, work: Callable[..., Any], arguments: Sequence[Any]
) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=size, timeout=timeout)
        dist.barrier()  # who leaves while another still connects breaks that one's connection
        (path / str(rank)).write_bytes(pickle.dumps(work(*arguments)))
        status = 0
    except BaseException:
        (path / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _load_kernels() -> None:
    """Here, once, and not in every rank."""
    for rule, ddr in itertools.product((optim.SGD(), optim.RowWiseAdagrad(), optim.Adam()), ("1MiB", "500KiB")):
        with tierstore.open(cold="memory", ddr=ddr, threads=1) as store:
            store.create_table(tierstore.TableConfig(name="t", num_embeddings=5_000, embedding_dim=20, optimizer=rule))
            module, optimizer = tierstore.TieredEmbeddingBagCollection(store), store.optimizer()
            ids = tierstore.KeyedJaggedTensor(["t"], torch.arange(9), lengths=torch.ones(9, dtype=torch.int64))
            module(ids).values().sum().backward()
            optimizer.clip_grad_norm_(max_norm=1.0)
            optimizer.step()
            store.commit()
    for eviction in (tierstore.ids.LRU(), tierstore.ids.LFU()):
        with tierstore.open(cold="memory", ddr="1MiB", threads=1) as store:
            rules = tierstore.DynamicIds(eviction=eviction)
            table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=20, ids=rules))
            for first in (0, 5, 10):
                table.admit(torch.arange(first, first + 8))
            owners_of(np.arange(9), 2)


def main() -> None:
    """Of each folder that a line of the input names, run what was called; prints a line that says how ranks ended."""
    _load_kernels()
    for line in sys.stdin:
        path = Path(line.strip())
        module, name, size, timeout_s, arguments = pickle.loads((path / "call").read_bytes())
        work = getattr(importlib.import_module(f"tests.dist.{module}"), name)
        timeout = timedelta(seconds=timeout_s)
        children = [_fork(path, rank, size, timeout, work, arguments) for rank in range(size)]
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)


if __name__ == "__main__":
    main()
