"""The training process beside a server: at each line on its input it changes rows and weights, and commits.

``python -m bench.serving.trainer STORE ROWS`` answers each line with one of JSON, once the commit is durable.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

import tierstore
from tierstore.train.build import build_run
from tierstore.train.checkpoint import Position, commit_run, restore_run, saved_config

from ..child import Child
from .queries import drawn
from .shape import CANARY, write_canary

_DDR: Final = "128MiB"
_EXPONENT: Final = 1.05
_NICE: Final = 19


class Commit(NamedTuple):
    """``committed``: on the clock of ``time.monotonic``, which all processes share, when ``commit`` returned."""

    version: int
    committed: float
    seconds: float
    rows: int


class TrainerProcess(Child):
    """The process; ready when this returns to commit so many changed rows at a time."""

    def __init__(self, store: Path, rows: int, *, log: Path) -> None:
        super().__init__([sys.executable, "-m", "bench.serving.trainer", store, rows], log=log)
        self.line()

    def commit(self) -> Commit:
        """Change rows and weights, and commit."""
        return Commit(**json.loads(self.ask("commit")))


def _ids(sizes: Mapping[str, int], count: int, generator: np.random.Generator) -> dict[str, Tensor]:
    """int64, distinct, of each table, drawn as the load draws them, so that those which are served are those which
    change; small tables change whole, and large ones make up for what they lack."""
    found, left = {}, count
    for number, (name, size) in enumerate(sorted(sizes.items(), key=lambda each: each[1])):
        share = min(size, left // (len(sizes) - number))
        left -= share
        ids = np.arange(size) if share * 4 >= size else np.empty(0, np.int64)
        while len(ids) < share:
            ids = np.union1d(ids, drawn(generator, size, _EXPONENT, 2 * share))
        found[name] = torch.from_numpy(generator.permutation(ids)[:share])
    return found


@torch.no_grad()
def _main(path: str, rows: str) -> None:
    process = psutil.Process()
    process.nice(_NICE)
    process.ionice(psutil.IOPRIO_CLASS_IDLE)
    with tierstore.open(path, mode="w", ddr=_DDR) as store:
        config = saved_config(store.extra, path)
        if config is None:
            raise ValueError(f"{path} has no commit of a training run")
        run, generator = build_run(config, store), np.random.default_rng(store.version)
        position, sizes = restore_run(run), dict(zip(config.data.sparse_columns, config.table_sizes, strict=True))
        print("ready", flush=True)
        for _ in sys.stdin:
            changed = _ids(sizes, int(rows), generator)
            for name, ids in changed.items():
                own = store[name].read(ids)
                store[name].write(ids, own + 1e-4 * torch.randn(own.shape))
            write_canary(store[CANARY], store.version + 1)
            for parameter in run.model.dense_parameters().values():
                parameter.add_(1e-5 * torch.randn(parameter.shape))
            position = Position(step=position.step + 1)
            begun = time.monotonic()
            version = commit_run(run, position).result()
            end = time.monotonic()
            print(json.dumps(Commit(version, end, end - begun, sum(map(len, changed.values())))._asdict()), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
