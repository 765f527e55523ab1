"""The demonstration: tables that do not fit the memory budget, and the same training with all of them in memory.

Its click data are of a known model, in Criteo's format, so the best AUC that anyone can reach on them is known. A
category is a rank drawn from a bounded Zipf law, written as the hash of its column and rank. Categories and dense
features have weights; a label is 1 with the logistic function of their sum as probability. No model can rank rows
better than these probabilities do.
"""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..dist.plan import MAX_RANKS
from ..errors import TierstoreError
from ..ids.texts import STEP
from ..kernels.arrays import Bytes, Float64s, Int64s
from ..kernels.hashing import mix64
from ..kernels.jit import kernel
from ..metrics import Evaluation, Predictions
from ..settings.sections import to_toml
from ..system.checks import require_int
from ..system.files import make_directory, names_in, write_text
from ..system.processes import child_options
from ..system.sizes import format_size
from ..system.terminal import columns_of
from .build import table_configs, trace_run
from .config import DataSection, EmbeddingSection, ModelSection, OptimizerSection, RunConfig, StoreSection, TrainSection
from .summary import run_page, table_of
from .trainer import command_name, warm_up

DEFAULT_ROWS: Final = 250_000
_TEST_SHARE: Final = 0.12
_BUDGET_SHARE: Final = 0.10
_NOTES: Final = (
    "The process is mostly Python, torch and compiled kernels, the same in both runs.",
    "What misses when all is in memory are first touches of rows never seen before.",
)
_MARKER: Final = ".tierstore-demo"
_PAGE_BYTES: Final = 4096
_MIN_TABLE_ROWS: Final = 1000
_RUN_FILE: Final = "demo.toml"
_IN_MEMORY_SHARE: Final = 2.0  # of the bytes of the rows that training touches: enough for all of them, with the index
CARDINALITIES: Final = (
    *(400_000, 250_000, 150_000, 100_000, 60_000, 40_000, 25_000, 15_000, 10_000, 6_000, 4_000, 2_500, 1_500),
    *(1_000, 600, 400, 250, 150, 100, 60, 40, 25, 12, 8, 5, 3),
)
"""Categories of each column."""
_NUM_DENSE: Final = 13
_CHUNK_ROWS: Final = 16_384
_EXPONENT: Final = 1.1  # of the Zipf law: the chance of rank r falls as r to this power
_CATEGORY_STD: Final = 0.4
_DENSE_STD: Final = 0.15
_RARE_POWER: Final = 0.05  # weights fall as the rank to this power: rare categories say a little less
_BIAS: Final = -2.0
_MISSING_SHARE: Final = 0.04  # in every second column
_MISSING: Final = -1
_MISSING_WORD: Final = "0" * 8


class _Rows(NamedTuple):
    labels: Bytes
    dense: Int64s
    hashes: NDArray[np.uint32]  # of the categories; 0 where missing
    logits: Float64s


def write_synthetic(path: str | Path, *, train_rows: int, test_rows: int, seed: int = 0) -> Evaluation:
    """Write rows to ``path``; the same seed writes the same bytes. Returns how well the true probabilities do on the
    test rows. ValueError: unless both numbers are at least 1."""
    if train_rows < 1 or test_rows < 1:
        raise ValueError(f"train_rows={train_rows} and test_rows={test_rows} must be at least 1")
    source = _Source(seed)
    best = Predictions()
    with Path(path).open("w", encoding="ascii", newline="\n") as file:
        for begin in range(0, train_rows + test_rows, _CHUNK_ROWS):
            rows = source.draw(min(_CHUNK_ROWS, train_rows + test_rows - begin))
            file.write(_text(rows))
            num_train = min(max(train_rows - begin, 0), len(rows.labels))
            if num_train < len(rows.labels):
                best.add(torch.from_numpy(rows.labels[num_train:]), torch.from_numpy(rows.logits[num_train:]))
    return best.evaluate()


class _Source:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._dense_weights = self._random.normal(0, _DENSE_STD, _NUM_DENSE)
        self._category_weights = [self._draw_weights(size) for size in CARDINALITIES]

    def _draw_weights(self, size: int) -> Float64s:
        """One weight a category; their mean over draws is 0, so that every seed gives about the same click rate."""
        weights = self._random.normal(0, _CATEGORY_STD, size) * np.arange(1, size + 1) ** -_RARE_POWER
        chances = np.diff(np.arange(1, size + 2) ** (1 - _EXPONENT)) / ((size + 1) ** (1 - _EXPONENT) - 1)
        centred: Float64s = weights - weights @ chances
        return centred

    def draw(self, count: int) -> _Rows:
        random = self._random
        size = random.normal(1, 1.5, (count, _NUM_DENSE))
        logits = _BIAS + (size - 1) @ self._dense_weights
        dense = np.floor(np.exp(size)).astype(np.int64)
        ranks = np.empty((count, len(CARDINALITIES)), np.int64)
        for column, weights in enumerate(self._category_weights):
            drawn = _zipf(random.random(count), len(weights))
            if column % 2:
                drawn[random.random(count) < _MISSING_SHARE] = _MISSING
            logits += np.where(drawn == _MISSING, 0.0, weights[drawn])
            ranks[:, column] = drawn
        labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
        hashes = np.zeros(ranks.shape, np.uint32)
        _hash(ranks, hashes)
        return _Rows(labels, dense, hashes, logits)


def _zipf(uniform: Float64s, size: int) -> Int64s:
    """Ranks from 0 to size - 1: the inverse of a power law's distribution function over [1, size + 1)."""
    power = 1 - _EXPONENT
    position = (((size + 1) ** power - 1) * uniform + 1) ** (1 / power)
    ranks: Int64s = np.minimum(position.astype(np.int64), size) - 1
    return ranks


def _text(rows: _Rows) -> str:
    words = rows.hashes.astype(">u4").tobytes().hex("\t", 4)
    width = len(words) // len(rows.hashes) + 1
    lines = []
    for row, numbers in enumerate(np.column_stack([rows.labels, rows.dense]).tolist()):
        categories = words[row * width : (row + 1) * width - 1].replace(_MISSING_WORD, "")
        lines.append("\t".join([*map(str, numbers), categories]))
    return "\n".join([*lines, ""])


@kernel
def _hash(ranks: Int64s, hashes: NDArray[np.uint32]) -> None:
    """The upper half of the hash of each rank and its column, [n, 26]; 0, which none of them has, where missing."""
    for column in range(ranks.shape[1]):
        for row in range(ranks.shape[0]):
            if ranks[row, column] >= 0:
                hashes[row, column] = mix64(np.uint64(ranks[row, column]) + np.uint64(column) * STEP) >> np.uint64(32)


def run_demo(directory: str | Path, *, rows: int = DEFAULT_ROWS, ranks: int = 1) -> bool:
    """Run the demonstration in ``directory``, which is emptied first. Returns whether both trainings are bit-identical.
    ``ranks``: processes of torchrun that divide tables and memory. ValueError: the directory holds something else, rows
    or ranks are too few. TierstoreError: a training failed."""
    require_int(ranks, "ranks", 1, MAX_RANKS)
    folder = Path(directory).absolute()
    _empty(folder)
    started = time.perf_counter()
    test_rows, path = int(rows * _TEST_SHARE), folder / "clicks.tsv"
    train_rows = rows - test_rows
    best = write_synthetic(path, train_rows=train_rows, test_rows=test_rows)
    config = RunConfig(
        data=DataSection(path=str(path), train_rows=train_rows, test_rows=test_rows),
        # As many rows as there are categories; more for few categories, so that hardly any two of those share a row.
        embedding=EmbeddingSection(dim=16, num_embeddings=tuple(max(_MIN_TABLE_ROWS, size) for size in CARDINALITIES)),
        model=ModelSection(bottom_mlp=(64,), top_mlp=(64,)),
        optimizer=OptimizerSection(
            sparse="adagrad", sparse_lr=0.03, sparse_initial_accumulator=1e-6, dense="adagrad", dense_lr=0.02
        ),
        train=TrainSection(batch_size=256, commit_every=500),
    )
    layout = table_configs(config)[0].layout(_PAGE_BYTES)
    # Rows of the tables that the training rows' categories fall on; several categories may share one.
    touched = sum(len(np.unique(table.ids)) for table in trace_run(config).tables.values())
    touched_bytes = touched * layout.row_bytes
    store = StoreSection(path=str(folder / "tiered"), ddr=int(_BUDGET_SHARE * touched_bytes / ranks))
    config = dataclasses.replace(config, store=store)
    (folder / _RUN_FILE).write_text(to_toml(config), encoding="utf-8")
    num_rows = sum(config.table_sizes)
    print(
        f"Generated {path} in {time.perf_counter() - started:.0f} s: {train_rows:,} rows to train on, "
        f"{test_rows:,} to test.\n"
        f"Its labels follow a known model: the best AUC anyone can reach on the test rows is {best.auc:.4f}.\n"
        f"{len(config.table_sizes)} tables, {num_rows:,} rows of {layout.row_bytes} bytes, "
        f"{format_size(num_rows * layout.row_bytes)}. "
        f"Training touches {touched:,} of the rows, {format_size(touched_bytes)}.\n"
        f"The memory budget is a tenth of that: {format_size(ranks * int(store.ddr))}"
        f"{f', divided among {ranks} ranks' if ranks > 1 else ''}."
    )
    warm_up(config)  # a process that compiles keeps what its compiler took: let it be this one, which is not measured
    run_file, enough = str(folder / _RUN_FILE), str(int(_IN_MEMORY_SHARE * touched_bytes))
    tiered = _train(folder, "tiered", [run_file], ranks)
    in_memory = _train(folder, "in-memory", [run_file, "--store", str(folder / "in-memory"), "--ddr", enough], ranks)
    runs = {"budget of 10 %": tiered, "all in memory": in_memory}
    equal: bool = tiered["bits"] == in_memory["bits"]
    notes = ["The two trainings ended in DIFFERENT bits. That is a bug in tierstore: please report it.", *_NOTES]
    if equal:
        notes[:1] = [
            "Both ended in the same bits: every row of every table and every dense weight.",
            f"AUC {tiered['test']['auc']:.4f}, where the true probabilities reach {best.auc:.4f}: "
            "what is missing is mostly categories seen too seldom to learn.",
        ]
    print("", *columns_of(table_of(runs), is_last_text=False), "", *notes, sep="\n")
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
  {page.absolute().as_uri()}

What to try next:
  {command} inspect {tiered}
  {command} verify {tiered}
  {train} {run_file} --resume --epochs 2
      a second epoch; stop it with Ctrl-C and resume it again
  {train} {run_file} --store {lfu} --policy lfu --prefetch-depth 8 --json {lfu}.json
      another policy, more rows fetched ahead: the same bits
  {command} train --keys
      every key of a run file, for data of your own"""
