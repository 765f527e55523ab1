"""How long until a process works: importing, compiling for the first time, and the first batch of a run?

Each time is of a fresh interpreter, its files in the page cache. The README's example runs from its exec to its end,
with an empty folder for numba's cache, as after ``pip install``, and again. The warm start is of a training process
that finds its kernels on disk, from its exec to the end of its first step over a store that is there.

The first lookup of a large store reads the index of each segment. The device's own time for as many pages, as far
apart, is that of one thread that queues them 1,024 ahead and touches them.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from . import diskio
from .common import Goal, Report, Run, Spread, Table, program
from .data import ROOT, examples

__all__ = ["fill", "first_step", "look_up_first", "run"]

_QUEUED = 1024
_STEPS = ("torch", "numba", "tierstore")

_IMPORT = """
import importlib, sys, time
for name in sys.argv[1:]:
    start = time.perf_counter()
    importlib.import_module(name)
    print(time.perf_counter() - start)
"""
_CALL = "import sys; from bench import start; getattr(start, sys.argv[1])(sys.argv[2], *map(int, sys.argv[3:]))"


def _run(code: str, *arguments: object, **environment: str) -> str:
    """What the code prints, in a fresh interpreter."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # python -c puts the current folder on the path.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def _open(folder: str, rows: int, dim: int) -> Any:
    import tierstore

    from .workload import make_store

    if (Path(folder) / "manifest.json").exists():
        return tierstore.open(folder, ddr="64MiB")
    rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
    return make_store(Path(folder), tables=1, rows=rows, dim=dim, optimizer=rule, ddr="64MiB")


def first_step(folder: str, rows: int, dim: int) -> None:
    """Open the store and train one batch; in a child."""
    import torch

    import tierstore

    with _open(folder, rows, dim) as store:
        bag = tierstore.TieredEmbeddingBag(store["t0"], mode="sum")
        model = torch.nn.Linear(dim, 1)
        ids = torch.randint(rows, (20480,), generator=torch.Generator().manual_seed(1))
        loss = model(bag(ids, torch.arange(0, len(ids), 10))).square().mean()
        loss.backward()
        print(loss.item(), flush=True)
        # What follows the first step is no part of the start.
        os._exit(0)


def fill(folder: str, rows: int, dim: int) -> None:
    """A committed store all of whose rows were written; in a child."""
    from .workload import write_every_row

    with _open(folder, rows, dim) as store:
        write_every_row(store["t0"])
        store.commit()


def _first_use() -> tuple[float, float]:
    """Seconds of the README's example, first and then again, with an empty cache of kernels."""
    (example,) = examples("README.md")
    seconds = []
    with tempfile.TemporaryDirectory(prefix="first-use-") as folder:
        for _ in range(2):
            began = time.perf_counter()
            shutil.rmtree(f"{folder}/shop", ignore_errors=True)
            _run(f"import os; os.chdir({folder!r})\n{example}", NUMBA_CACHE_DIR=f"{folder}/a", PYTHONPATH=str(ROOT))
            seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1]


def _first_steps(folder: Path, config: dict[str, Any]) -> list[float]:
    """Seconds from exec to the end of the first step."""
    given, seconds = (folder, config["rows"], config["dim"]), []
    shutil.rmtree(folder, ignore_errors=True)
    _run(_CALL, "fill", *given)
    for _ in range(config["repetitions"] + 1):
        began = time.perf_counter()
        _run(_CALL, "first_step", *given)
        seconds.append(time.perf_counter() - began)
    shutil.rmtree(folder)
    return seconds[1:]


def look_up_first(folder: str, dim: int) -> None:
    """Open the store for reading and look one row up; prints the seconds of either and the bytes read. In a child."""
    import torch

    import tierstore

    from .workload import make_store

    small = Path(tempfile.mkdtemp())  # whatever is compiled or loaded once
    rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
    with make_store(small, tables=1, rows=2000, dim=dim, optimizer=rule, ddr="8MiB") as store:
        store["t0"].write(torch.arange(1000), torch.ones(1000, dim))
        store.commit()
    with tierstore.open(small, mode="r", ddr="8MiB") as store:
        store["t0"].read(torch.tensor([3]))
    shutil.rmtree(small)
    before, began = diskio.of_process(), time.perf_counter()
    with tierstore.open(folder, mode="r", ddr="8MiB") as store:
        opened = time.perf_counter()
        store["t0"].read(torch.tensor([3]))
        print(json.dumps([opened - began, time.perf_counter() - opened, (diskio.of_process() - before).read]))


def _device_seconds(path: Path, pages: int) -> float:
    """To read so many pages of a file, as far apart as it allows."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        content.madvise(mmap.MADV_RANDOM)
        step = len(content) // pages // mmap.PAGESIZE * mmap.PAGESIZE
        began = time.perf_counter()
        for ahead in range(pages + _QUEUED):
            if ahead < pages:
                content.madvise(mmap.MADV_WILLNEED, ahead * step, mmap.PAGESIZE)
            if ahead >= _QUEUED:
                content[(ahead - _QUEUED) * step]
        return time.perf_counter() - began


def _forget(path: Path) -> None:
    """Have nothing of a file in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Large(NamedTuple):
    """First lookups of a large store; seconds of each repetition."""

    opening: list[float]
    first: list[float]
    device: list[float]
    bytes_a_row: float


def _large(folder: Path, config: dict[str, Any]) -> _Large:
    rows, dim, found = config["large_rows"], config["large_dim"], _Large([], [], [], 0.0)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(_CALL, "fill", folder, rows, dim)
        path = folder / "rows.lmdb"
        for _ in range(config["compilations"]):
            _forget(path)
            opening, first, size_bytes = json.loads(_run(_CALL, "look_up_first", folder, dim))
            _forget(path)
            found.opening.append(opening)
            found.first.append(first)
            found.device.append(_device_seconds(path, max(1, size_bytes // mmap.PAGESIZE)))
            found = found._replace(bytes_a_row=size_bytes / rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def run(request: Run) -> Report:
    config = request.config
    imports = [
        [float(line) for line in _run(_IMPORT, "torch", "tierstore").split()] for _ in range(config["repetitions"])
    ]
    firsts, agains = zip(*[_first_use() for _ in range(config["compilations"])], strict=True)
    steps = _first_steps(request.folder / "start", config)
    large, many = _large(request.folder / "start-large", config), f"{config['large_rows']:,} rows"
    times = {
        "import torch": [plain[0] for plain in imports],
        "import tierstore, beyond torch": [plain[1] for plain in imports],
        "README's example, the first time": firsts,
        "README's example, later": agains,
        "a training run, later: from exec to the end of the first step": steps,
        f"opening a store of {many} for reading, page cache empty": large.opening,
        f"its first lookup, {large.bytes_a_row:.1f} bytes read a row with opening": large.first,
        "the device, for as many pages": large.device,
    }
    spreads = {name: Spread.of(seconds) for name, seconds in times.items()}
    medians = {name: each.median for name, each in spreads.items()}
    _, beyond, first, again, warm = list(medians.values())[:5]
    share = statistics.median(sum(each[:2]) / each[2] for each in zip(*large[:3], strict=True))
    return Report(
        question="How long until a process works: importing, compiling for the first time, the first batch?",
        tables=[
            Table(
                title="seconds, fresh interpreter, files in the page cache",
                columns=["", "median s", "lowest", "highest"],
                rows=[
                    [name, f"{each.median:.2f}", f"{each.lowest:.2f}", f"{each.highest:.2f}"]
                    for name, each in spreads.items()
                ],
            )
        ],
        figures={"seconds": medians},
        goals=[
            Goal(name="seconds of import beyond torch's own", value=round(beyond, 3), at_most=1.0),
            Goal(name="seconds of compiling in the README's example", value=round(first - again, 2), at_most=15),
            Goal(name="seconds to the first trained batch, later runs", value=round(warm, 2), at_most=3),
            Goal(name=f"bytes a row, to look up one of {many}", value=round(large.bytes_a_row, 1), at_most=25),
            Goal(name="times the device's time for them", value=round(share, 2), at_most=1.3),
        ],
        notes=[
            f"The store of the later runs has {config['rows']:,} rows of {config['dim']} float32, all written; the "
            "step is of 2,048 bags of 10 random ids, with the imports, opening the store and reading rows from it. The "
            f"large store has {many} of {config['large_dim']} float32 with row-wise Adagrad, all written in order."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("start", run))
