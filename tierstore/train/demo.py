"""The demonstration: tables that do not fit the memory budget, and the same training with all of them in memory."""

import dataclasses
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..dist.plan import MAX_RANKS
from ..errors import TierstoreError
from ..io.files import ROW_FILE_NAME
from ..layout import WORD_BYTES, RowLayout
from ..settings.sections import to_toml
from ..store import open_store
from ..system.checks import require_int
from ..system.files import make_directory, names_in, write_text
from ..system.processes import child_options
from ..system.sizes import format_size
from ..system.terminal import columns_of
from .build import table_configs, trace_run
from .config import DataSection, EmbeddingSection, ModelSection, OptimizerSection, RunConfig, StoreSection, TrainSection
from .report import run_page, table_of
from .synthetic import CARDINALITIES, SyntheticData, write_synthetic
from .terminal import command_name, python_name
from .trainer import warm_up

DEFAULT_ROWS: Final = 250_000
_TEST_SHARE: Final = 0.12
_BUDGET_SHARE: Final = 0.10
_HBM_SHARE: Final = 0.05
_NOTES: Final = (
    "The process is mostly Python, torch and compiled kernels, the same in both runs.",
    "What misses when all is in memory are first touches of rows never seen before.",
    "A store takes up to 1.4 times its rows, and 48 MiB or a tenth that LMDB reuses (docs/durability.md, disk space).",
)
_MARKER: Final = ".tierstore-demo"
_PAGE_BYTES: Final = 4096
_MIN_TABLE_ROWS: Final = 1000
_RUN_FILE: Final = "demo.toml"
_IN_MEMORY_SHARE: Final = 2.0  # of the bytes of the rows that training touches: enough for all of them, with the index


def run_demo(
    directory: str | Path,
    *,
    rows: int = DEFAULT_ROWS,
    device: str = "cpu",
    hbm: int | str | None = None,
    ranks: int = 1,
) -> bool:
    """Run the demonstration in ``directory``, which is emptied first. Returns whether both trainings are bit-identical.
    ``hbm``: GPU memory for rows, by default a twentieth of them on a GPU; ``ranks``: processes of torchrun that divide
    tables and memory. ValueError: the directory holds something else, rows or ranks are too few, or a store refuses
    device or size. TierstoreError: a training failed."""
    require_int(ranks, "ranks", 1, MAX_RANKS)
    if ranks > 1 and (device != "cpu" or hbm is not None):
        raise ValueError(f"ranks={ranks}: several train on the CPU for now; leave device and hbm away")
    default_hbm = 0.0 if device == "cpu" else _HBM_SHARE  # of the bytes of the rows that training touches
    if device != "cpu" or hbm is not None:  # what a store would refuse is reported before anything is made
        open_store(cold="memory", device=device, hbm=math.ceil(default_hbm) if hbm is None else hbm).close()
    folder = Path(directory).absolute()
    _empty(folder)
    started = time.perf_counter()
    test_rows = int(rows * _TEST_SHARE)
    data = write_synthetic(folder / "clicks.tsv", train_rows=rows - test_rows, test_rows=test_rows)
    config = RunConfig(
        data=DataSection(path=str(data.path), train_rows=data.train_rows, test_rows=data.test_rows),
        # As many rows as there are categories; more for few categories, so that hardly any two of those share a row.
        embedding=EmbeddingSection(dim=16, num_embeddings=tuple(max(_MIN_TABLE_ROWS, size) for size in CARDINALITIES)),
        model=ModelSection(bottom_mlp=(64,), top_mlp=(64,)),
        optimizer=OptimizerSection(
            sparse="adagrad", sparse_lr=0.03, sparse_initial_accumulator=1e-6, dense="adagrad", dense_lr=0.02
        ),
        train=TrainSection(batch_size=256, commit_every=500),
    )
    layout = table_configs(config)[0].layout(_PAGE_BYTES)
    row_bytes = layout.row_bytes
    # Rows of the tables that the training rows' categories fall on; several categories may share one.
    touched = sum(len(np.unique(table.ids)) for table in trace_run(config).tables.values())
    ddr, own_hbm = int(_BUDGET_SHARE * touched * row_bytes / ranks), math.ceil(default_hbm * touched * row_bytes)
    store = StoreSection(path=str(folder / "tiered"), ddr=ddr, hbm=own_hbm if hbm is None else hbm, device=device)
    config = dataclasses.replace(config, store=store)
    (folder / _RUN_FILE).write_text(to_toml(config), encoding="utf-8")
    _explain(data, config, touched, layout, ranks, time.perf_counter() - started)
    warm_up(config)  # a process that compiles keeps what its compiler took: let it be this one, which is not measured
    run_file, enough = str(folder / _RUN_FILE), str(int(_IN_MEMORY_SHARE * touched * row_bytes))
    flags = ["--ddr", enough, *(["--hbm", enough] if config.store.has_hbm else [])]
    tiered = _train(folder, "tiered", [run_file], ranks)
    in_memory = _train(folder, "in-memory", [run_file, "--store", str(folder / "in-memory"), *flags], ranks)
    runs = {"budget of 10 %": tiered, "all in memory": in_memory}
    equal: bool = tiered["bits"] == in_memory["bits"]
    notes = ["The two trainings ended in DIFFERENT bits. That is a bug in tierstore: please report it.", *_NOTES]
    if equal:
        notes[:1] = [
            "Both ended in the same bits: every row of every table and every dense weight.",
            f"AUC {tiered['test']['auc']:.4f}, where the true probabilities reach {data.best.auc:.4f}: "
            "what is missing is mostly categories seen too seldom to learn.",
        ]
    on_disk = ["store's rows on disk"]
    for run in runs.values():
        stores = [each["store"] for each in run["ranks"]] or [run["store"]]
        blocks = sum((Path(store) / ROW_FILE_NAME).stat().st_blocks for store in stores)
        on_disk.append(format_size(512 * blocks))
    print("", *columns_of([*table_of(runs), on_disk], is_last_text=False), "", *notes, sep="\n")
    page = folder / "demo.html"
    title = "tierstore: the same training, with a tenth of the memory and with all of it"
    write_text(page, run_page(title, runs, notes=notes), force=True)
    print(_next_steps(folder, page, ranks))
    return equal


def _empty(folder: Path) -> None:
    """Make the folder, or empty it if it is a demonstration's."""
    if folder.exists() and (not folder.is_dir() or names_in(folder)):
        if not (folder / _MARKER).exists():
            raise ValueError(f"{folder} exists and is no demonstration; choose another folder with --dir")
        print(f"Overwriting the demonstration in {folder}.")
        shutil.rmtree(folder)
    make_directory(folder)
    (folder / _MARKER).touch()


def _explain(
    data: SyntheticData, config: RunConfig, touched: int, layout: RowLayout, ranks: int, seconds: float
) -> None:
    num_rows, row_bytes, hbm = sum(config.table_sizes), layout.row_bytes, config.store.hbm
    shown = format_size(hbm) if isinstance(hbm, int) else hbm
    print(
        f"Generated {data.path} in {seconds:.0f} s: {data.train_rows:,} rows to train on, {data.test_rows:,} to test.\n"
        f"Its labels follow a known model: the best AUC anyone can reach on the test rows is {data.best.auc:.4f}.\n"
        f"{len(config.table_sizes)} tables, {num_rows:,} rows of {row_bytes} bytes, "
        f"{format_size(num_rows * row_bytes)}. "
        f"Training touches {touched:,} of the rows, {format_size(touched * row_bytes)}.\n"
        f"In memory an index comes on top. On SSD a row takes {layout.stored_row_words * WORD_BYTES} bytes.\n"
        f"The memory budget is a tenth of what it touches: {format_size(ranks * int(config.store.ddr))}"
        f"{f', divided among {ranks} ranks' if ranks > 1 else ''}"
        f"{f', and {shown} of HBM on {config.store.device}' if config.store.has_hbm else ''}."
    )


def _train(folder: Path, name: str, arguments: list[str], ranks: int) -> dict[str, Any]:
    """One training in processes of its own, so that its peak memory is its own."""
    report = folder / f"{name}.json"
    arguments = ["train", *arguments, "--json", str(report)]
    print(f"\n$ {command_name(ranks)} {shlex.join(arguments)}", flush=True)
    launcher = [] if ranks == 1 else ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    one = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # which torchrun sets too, and says so at length
    command = [sys.executable, "-P", "-m", *launcher, "tierstore", *arguments]
    finished = subprocess.run(command, check=False, **child_options(**({} if ranks == 1 else one)))
    if finished.returncode:
        raise TierstoreError(f"training {name} ended with status {finished.returncode}; its message is above")
    return dict(json.loads(report.read_text(encoding="utf-8")))


def _next_steps(folder: Path, page: Path, ranks: int) -> str:
    run_file, command, train = shlex.quote(str(folder / _RUN_FILE)), command_name(), f"{command_name(ranks)} train"
    tiered, lfu = shlex.quote(str(folder / "tiered")), shlex.quote(str(folder / "lfu"))
    return f"""
Loss, hit rate, reads and writes of both, as plots in one file that needs no network:
  {python_name()} -m webbrowser {shlex.quote(page.absolute().as_uri())}

What to try next:
  {command} inspect {tiered}
  {command} verify {tiered}
  {train} {run_file} --resume --epochs 2
      a second epoch; stop it with Ctrl-C and resume it again
  {train} {run_file} --store {lfu} --policy lfu --prefetch-depth 8 --json {lfu}.json
      another policy, more rows fetched ahead: the same bits
  {command} train --keys
      every key of a run file, for data of your own"""
