"""How long until a process works: importing, compiling for the first time, and the first batch of a run?

Each time is of a fresh interpreter, its files in the page cache. The README's example runs from its exec to its end,
with an empty folder for numba's cache, as after ``pip install``, and again; ``tierstore compile`` fills an empty one.
Compiling in one process does what a training run (write, prefetch, train, write back, commit) and then a read-only
lookup need. The warm start is of a training process that finds its kernels on disk, from its exec to the end of its
first step over a store that is there.

The first lookup of a large store reads the index of each segment. The device's own time for as many pages, as far
apart, is that of one thread that queues them 1,024 ahead and touches them.
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from . import diskio
from .common import Goal, Report, Run, Spread, Table, program
from .data import ROOT, examples

__all__ = ["Compiled", "own_times", "run"]

_QUEUED = 1024
_STEPS = ("torch", "numba", "tierstore")

_IMPORT = """
import importlib, sys, time
for name in sys.argv[1:]:
    start = time.perf_counter()
    importlib.import_module(name)
    print(time.perf_counter() - start)
"""

_TRAIN = """
import sys
from bench import start
start.first_step(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""

_COMPILE = """
import sys
from bench import start
start.use_every_kernel(sys.argv[1])
"""


class Compiled(NamedTuple):
    """A kernel that was compiled.

    Attributes:
        name: module and function.
        seconds: its own, without those of the helpers that were compiled meanwhile.
        signatures: for how many types of arguments.
    """

    name: str
    seconds: float
    signatures: int


def _run(code: str, *arguments: object, **environment: str) -> str:
    """What the code prints, in a fresh interpreter."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # python -c puts the current folder on the path.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def _import_seconds(*modules: str) -> list[float]:
    """Seconds to import each module after those before it."""
    return [float(line) for line in _run(_IMPORT, *modules).split()]


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
    """A committed store all of whose rows were written."""
    from .workload import write_every_row

    with _open(folder, rows, dim) as store:
        write_every_row(store["t0"])
        store.commit()


def use_every_kernel(folder: str) -> None:
    """Train and commit in a store too large for its budget, and in one that fits, then look up in each; in a child.

    Prints as JSON the seconds in all, and of each kernel that was compiled.
    """
    from numba.core import event

    import tierstore
    from tierstore.kernels.jit import FIRST_USE
    from tierstore.train import config as _  # noqa: F401 - what a training run imports

    FIRST_USE.is_alone = True  # all is compiled where it is recorded
    with event.install_recorder("numba:compile") as recorder:
        began = time.perf_counter()
        for name, ddr in (("part", "1MiB"), ("whole", "64MiB")):
            _work(Path(folder) / name, ddr)
        for name, ddr in (("part", "1MiB"), ("whole", "64MiB")):
            with tierstore.open(Path(folder) / name, mode="r", ddr=ddr) as store:
                _look_up(store)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "kernels": [each._asdict() for each in own_times(recorder.buffer)]}))


def _work(folder: Path, ddr: str) -> None:
    import torch

    import tierstore

    from .workload import make_store

    rows, dim = 20_000, 16
    rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
    with make_store(folder, tables=2, rows=rows, dim=dim, optimizer=rule, ddr=ddr) as store:
        for table in store.tables.values():
            table.write(torch.arange(rows), torch.ones(rows, dim))
        module = tierstore.TieredEmbeddingBagCollection(store)
        offsets = torch.arange(0, 4001, 10)
        generator = torch.Generator().manual_seed(1)
        batches = (
            tierstore.KeyedJaggedTensor(
                ["f0", "f1"], torch.randint(rows, (4000,), generator=generator), offsets=offsets
            )
            for _ in range(4)
        )
        for batch in tierstore.prefetch(batches, module, depth=2, features=lambda given: given):
            out = module(batch).values()
            out.backward(torch.ones_like(out))
            store.commit_async()
        store.commit()


def _look_up(store: Any) -> None:
    import torch

    ids = torch.arange(0, 20_000, 7)
    for table in store.tables.values():
        table.read(ids)
        for mode in ("sum", "mean"):
            table.pooled(ids, torch.tensor([0, 10, len(ids)]), mode=mode)


def own_times(events: list[Any]) -> list[Compiled]:
    """Of each kernel, longest first. Compilations nest: a helper is compiled while its caller is."""
    own: dict[str, float] = defaultdict(float)
    signatures: dict[str, int] = defaultdict(int)
    open_since: list[list[Any]] = []
    for when, each in events:
        function = each.data["dispatcher"].py_func
        if each.is_start:
            open_since.append([f"{function.__module__}.{function.__name__}", when, 0.0])
            continue
        name, start, inner = open_since.pop()
        own[name] += when - start - inner
        signatures[name] += 1
        if open_since:
            open_since[-1][2] += when - start
    found = [Compiled(name, seconds, signatures[name]) for name, seconds in own.items()]
    return sorted(found, key=lambda each: -each.seconds)


def _first_use() -> list[float]:
    """Seconds of the README's example, first and then again, and of ``tierstore compile`` with an empty cache."""
    (example,) = examples("README.md")
    seconds = []
    with tempfile.TemporaryDirectory(prefix="first-use-") as folder:
        for cache, code in (
            ("a", example),
            ("a", example),
            ("b", "from tierstore import cli; cli.main(['compile'])"),
        ):
            began = time.perf_counter()
            shutil.rmtree(f"{folder}/shop", ignore_errors=True)
            _run(f"import os; os.chdir({folder!r})\n{code}", NUMBA_CACHE_DIR=f"{folder}/{cache}", PYTHONPATH=str(ROOT))
            seconds.append(time.perf_counter() - began)
    return seconds


def _compile() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="first-compile-") as folder:
        found: dict[str, Any] = json.loads(_run(_COMPILE, Path(folder) / "store", NUMBA_CACHE_DIR=f"{folder}/cache"))
    return found


def _first_steps(request: Run) -> list[float]:
    """Seconds from exec to the end of the first step, over one store after another of the same rows."""
    config, folder = request.config, request.folder / "start"
    shutil.rmtree(folder, ignore_errors=True)
    rows, dim = config["rows"], config["dim"]
    try:
        _run("import sys; from bench import start; start.fill(sys.argv[1], *map(int, sys.argv[2:]))", folder, rows, dim)
        seconds = []
        for _ in range(config["repetitions"] + 1):
            began = time.perf_counter()
            _run(_TRAIN, folder, rows, dim)
            seconds.append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return seconds[1:]


_LARGE = """
import sys
from bench import start
start.look_up_first(sys.argv[1], int(sys.argv[2]))
"""


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


def _large(request: Run) -> _Large:
    config, folder = request.config, request.folder / "start-large"
    rows, dim, found = config["large_rows"], config["large_dim"], _Large([], [], [], 0.0)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run("import sys; from bench import start; start.fill(sys.argv[1], *map(int, sys.argv[2:]))", folder, rows, dim)
        path = folder / "rows.lmdb"
        for _ in range(config["compilations"]):
            _forget(path)
            opening, first, size_bytes = json.loads(_run(_LARGE, folder, dim))
            _forget(path)
            found.opening.append(opening)
            found.first.append(first)
            found.device.append(_device_seconds(path, max(1, size_bytes // mmap.PAGESIZE)))
            found = found._replace(bytes_a_row=size_bytes / rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _imports(repetitions: int) -> dict[str, Spread]:
    _import_seconds(*_STEPS)
    found = [(_import_seconds("torch", "tierstore"), _import_seconds(*_STEPS)) for _ in range(repetitions)]
    return {
        "import torch": Spread.of([plain[0] for plain, _ in found]),
        "import tierstore, beyond torch": Spread.of([plain[1] for plain, _ in found]),
        "of which numba": Spread.of([steps[1] for _, steps in found]),
        "of which tierstore and the rest": Spread.of([steps[2] for _, steps in found]),
    }


def _kernels(compiled: dict[str, Any]) -> Table:
    rows = [
        [each["name"].removeprefix("tierstore."), f"{each['seconds']:.2f}", str(each["signatures"])]
        for each in compiled["kernels"][:10]
    ]
    return Table(title="kernels that took longest to compile", columns=["kernel", "s", "signatures"], rows=rows)


def run(request: Run) -> Report:
    config = request.config
    times = _imports(config["repetitions"])
    compiled = [_compile() for _ in range(config["compilations"])]
    uses = [_first_use() for _ in range(config["compilations"])]
    names = ("README's example, the first time", "README's example, later", "tierstore compile, the first time")
    for name, seconds in zip(names, zip(*uses, strict=True), strict=True):
        times[name] = Spread.of(list(seconds))
    times["compiling every kernel of a training and a read-only lookup, in one process"] = Spread.of(
        [each["seconds"] for each in compiled]
    )
    times["a training run, later: from exec to the end of the first step"] = Spread.of(_first_steps(request))
    large, rows = _large(request), f"{config['large_rows']:,} rows"
    times[f"opening a store of {rows} for reading, page cache empty"] = Spread.of(large.opening)
    times[f"its first lookup, {large.bytes_a_row:.1f} bytes read a row with opening"] = Spread.of(large.first)
    times["the device, for as many pages"] = Spread.of(large.device)
    beyond, first, again, warm = (list(times.values())[place].median for place in (1, 4, 5, 8))
    share = Spread.of([sum(each[:2]) / each[2] for each in zip(*large[:3], strict=True)])
    kernels = compiled[-1]["kernels"]
    return Report(
        question="How long until a process works: importing, compiling for the first time, the first batch?",
        tables=[
            Table(
                title="seconds, fresh interpreter, files in the page cache",
                columns=["", "median s", "lowest", "highest"],
                rows=[
                    [name, f"{each.median:.2f}", f"{each.lowest:.2f}", f"{each.highest:.2f}"]
                    for name, each in times.items()
                ],
            ),
            _kernels(compiled[-1]),
        ],
        figures={"seconds": {name: each.median for name, each in times.items()}, "kernels": kernels},
        goals=[
            Goal(name="seconds of import beyond torch's own", value=round(beyond, 3), at_most=1.0),
            Goal(name="seconds of compiling in the README's example", value=round(first - again, 2), at_most=15),
            Goal(name="seconds to the first trained batch, later runs", value=round(warm, 2), at_most=3),
            Goal(name=f"bytes a row, to look up one of {rows}", value=round(large.bytes_a_row, 1), at_most=25),
            Goal(name="times the device's time for them", value=round(share.median, 2), at_most=1.3),
        ],
        notes=[
            f"{sum(each['signatures'] for each in kernels)} signatures of {len(kernels)} kernels and helpers, "
            f"{sum(each['seconds'] for each in kernels):.1f} s of compiling; a kernel's are without its helpers'. "
            f"The store of the later runs has {config['rows']:,} rows of {config['dim']} float32, all written; the "
            "step is of 2,048 bags of 10 random ids, with the imports, opening the store and reading rows from it. The "
            f"large store has {rows} of {config['large_dim']} float32 with row-wise Adagrad, all written in order."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("start", run))
