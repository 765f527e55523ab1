"""Small runs for the trainer's tests."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tierstore.models import DLRM
from tierstore.train.build import build_run, open_run_store
from tierstore.train.checkpoint import commit_run, restore_run
from tierstore.train.config import Override, RunConfig, load
from tierstore.train.demo import write_synthetic

_T = TypeVar("_T")
TRAIN_ROWS = 300
TEST_ROWS = 100
TOWERS = [[f"C{i}" for i in range(start, 27, 3)] for start in (1, 2, 3)]

SMALL: dict[str, object] = {
    "data__train_rows": TRAIN_ROWS, "data__test_rows": TEST_ROWS, "embedding__dim": 4, "embedding__num_embeddings": 150,
    "model__bottom_mlp": [8], "model__top_mlp": [8], "train__batch_size": 32, "train__epochs": 2,
    "train__commit_every": 0, "store__ddr": "64MiB",
}  # fmt: skip


@functools.cache
def clicks(folder: Path) -> Path:
    write_synthetic(path := folder / "clicks.tsv", train_rows=TRAIN_ROWS, test_rows=TEST_ROWS)
    return path


def config_of(folder: Path, store: str, **changes: object) -> RunConfig:
    """The small run with keys changed, as ``train__epochs=3``; its store is ``folder / store``."""
    run_file = folder / "empty.toml"
    run_file.write_text("")
    keys = SMALL | {"store__path": str(folder / store), "data__path": str(clicks(folder)), **changes}
    return load(run_file, [Override(*name.split("__"), value, name) for name, value in keys.items()])


def commit_scaled(config: RunConfig, factor: float, evaluate: Callable[[DLRM], _T]) -> tuple[int, _T]:
    with open_run_store(config) as store, torch.no_grad():
        run = build_run(config, store)
        position = restore_run(run)
        for each in run.model.dense_parameters().values():
            each.mul_(factor)
        version = commit_run(run, position).result()
        return version, evaluate(run.model.eval())
