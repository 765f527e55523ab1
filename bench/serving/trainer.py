"""The training process beside a server: at each line on its input it changes rows and weights, and commits.

``python -m bench.serving.trainer STORE ROWS NICE`` answers each line with one of JSON, once the commit is durable.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch

import tierstore
from tierstore.train.build import build_run
from tierstore.train.checkpoint import Position, commit_run, restore_run, saved_config
from tierstore.train.config import RunConfig

from ..child import Child
from .queries import Zipf
from .shape import CANARY, write_canary

__all__ = ["Commit", "TrainerProcess"]

_DDR: Final = "128MiB"
_EXPONENT: Final = 1.05


class Commit(NamedTuple):
    """Attributes:
    committed: on the clock of ``time.monotonic``, which all processes of a machine share, when ``commit`` returned.
    seconds: that the commit took.
    """

    version: int
    committed: float
    seconds: float
    rows: int


class TrainerProcess(Child):
    """The process; ready to commit when this returns.

    Args:
        rows: that each commit changes.
        nice: its niceness; its class of input and output is "idle".
    """

    def __init__(self, store: Path, rows: int, *, nice: int, log: Path) -> None:
        super().__init__([sys.executable, "-m", "bench.serving.trainer", store, rows, nice], log=log)
        self.line()

    def commit(self) -> Commit:
        """Change rows and weights, and commit; RuntimeError if the process ended."""
        return Commit(**json.loads(self.ask("commit")))


class _Trainer:
    """Rows drawn as the load draws them, so that those which are served are those which change."""

    def __init__(self, store: tierstore.Store, config: RunConfig, rows: int) -> None:
        self._run, self._config = build_run(config, store), config
        self._position = restore_run(self._run)
        self._generator = np.random.default_rng(store.version)
        self._laws = {
            name: (size, Zipf(size, _EXPONENT))
            for name, size in zip(config.data.sparse_columns, config.table_sizes, strict=True)
        }
        self._rows = rows

    def _ids(self) -> dict[str, Any]:
        """int64, distinct, of each table; small tables change whole, and large ones make up for what they lack."""
        found, left = {}, self._rows
        for number, (name, (size, law)) in enumerate(sorted(self._laws.items(), key=lambda each: each[1][0])):
            share = min(size, left // (len(self._laws) - number))
            left -= share
            ids = np.arange(size) if share * 4 >= size else np.empty(0, np.int64)
            while len(ids) < share:
                ids = np.union1d(ids, law.draw(self._generator, 2 * share))
            found[name] = self._generator.permutation(ids)[:share]
        return found

    @torch.no_grad()
    def commit(self) -> Commit:
        store, changed = self._run.store, self._ids()
        for name, drawn in changed.items():
            ids = torch.from_numpy(drawn)
            rows = store[name].read(ids)
            store[name].write(ids, rows + 1e-4 * torch.randn(rows.shape))
        write_canary(store[CANARY], store.version + 1)
        for parameter in self._run.model.dense_parameters().values():
            parameter.add_(1e-5 * torch.randn(parameter.shape))
        self._position = Position(step=self._position.step + 1)
        start = time.monotonic()
        version = commit_run(self._run, self._config, self._position).result()
        end = time.monotonic()
        return Commit(version, end, end - start, sum(map(len, changed.values())))


def _main(path: str, rows: str, nice: str) -> int:
    process = psutil.Process()
    process.nice(int(nice))
    process.ionice(psutil.IOPRIO_CLASS_IDLE)
    with tierstore.open(path, mode="w", ddr=_DDR) as store:
        config = saved_config(store.extra, path)
        if config is None:
            raise ValueError(f"{path} has no commit of a training run")
        trainer = _Trainer(store, config, int(rows))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(trainer.commit()._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
