"""The training process beside a server: at each line on its input it changes rows and weights, and commits.

``python -m bench.serving.trainer STORE ROWS NICE`` answers each line with one of JSON, once the commit is durable.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch

import tierstore
from tierstore.train.build import Run, build_run
from tierstore.train.checkpoint import Position, commit_run, restore_run, saved_config
from tierstore.train.config import RunConfig

from ..data import ROOT
from .shape import CANARY, write_canary
from .zipf import Zipf

__all__ = ["Commit", "TrainerProcess"]

_DDR: Final = "128MiB"
_EXPONENT: Final = 1.05
_READY: Final = "ready"
_STOP_SECONDS: Final = 120.0


class Commit(NamedTuple):
    """Attributes:
    committed: on the clock of ``time.monotonic``, which all processes of a machine share, when ``commit`` returned.
    seconds: that the commit took.
    """

    version: int
    committed: float
    seconds: float
    rows: int


class TrainerProcess:
    """The process; ready to commit when this returns.

    Args:
        rows: that each commit changes.
        nice: its niceness; its class of input and output is "idle".
    """

    def __init__(self, store: Path, rows: int, *, nice: int, log: Path) -> None:
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.serving.trainer", str(store), str(rows), str(nice)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        if self._line() != _READY:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
            raise RuntimeError(f"the trainer did not start; its log is {log}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def commit(self) -> Commit:
        """Change rows and weights, and commit; RuntimeError if the process ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("commit\n")
        self._process.stdin.flush()
        line = self._line()
        if not line:
            raise RuntimeError("the trainer ended")
        return Commit(**json.loads(line))

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        self._process.stdout.close()


class _Trainer:
    """Rows drawn as the load draws them, so that those which are served are those which change."""

    def __init__(self, store: tierstore.Store, config: RunConfig, rows: int) -> None:
        self._run: Run = build_run(config, store)
        self._config = config
        self._position = restore_run(self._run)
        self._generator = np.random.default_rng(store.version)
        names = config.data.sparse_columns
        self._laws = [Zipf(size, _EXPONENT) for size in config.table_sizes]
        self._names = names
        self._share = self._shares(rows)

    def _shares(self, rows: int) -> list[int]:
        """Rows of each table; small tables change whole, and large ones make up for what they lack."""
        sizes, shares, left = self._config.table_sizes, [0] * len(self._names), rows
        for number, table in enumerate(sorted(range(len(sizes)), key=lambda each: sizes[each])):
            shares[table] = min(sizes[table], left // (len(sizes) - number))
            left -= shares[table]
        return shares

    def _ids(self, table: int) -> Any:
        """int64, distinct, as many as the table's share."""
        share, size = self._share[table], self._config.table_sizes[table]
        if share * 4 >= size:
            return self._generator.permutation(size)[:share]
        found = np.empty(0, np.int64)
        while len(found) < share:
            drawn = self._laws[table].draw(self._generator, 2 * share)
            found = np.unique(np.concatenate([found, drawn]))
        return self._generator.permutation(found)[:share]

    @torch.no_grad()
    def commit(self) -> Commit:
        store, changed = self._run.store, 0
        for number, name in enumerate(self._names):
            ids = torch.from_numpy(self._ids(number))
            table = store[name]
            rows = table.read(ids)
            table.write(ids, rows + 1e-4 * torch.randn(rows.shape))
            changed += len(ids)
        write_canary(store[CANARY], store.version + 1)
        for parameter in self._run.model.dense_parameters().values():
            parameter.add_(1e-5 * torch.randn(parameter.shape))
        self._position = Position(step=self._position.step + 1)
        start = time.monotonic()
        version = commit_run(self._run, self._config, self._position).result()
        end = time.monotonic()
        return Commit(version, end, end - start, changed)


def _main(arguments: list[str]) -> int:
    path, rows = Path(arguments[0]), int(arguments[1])
    process = psutil.Process()
    process.nice(int(arguments[2]))
    process.ionice(psutil.IOPRIO_CLASS_IDLE)
    with tierstore.open(path, mode="w", ddr=_DDR) as store:
        config = saved_config(store.extra, str(path))
        if config is None:
            raise ValueError(f"{path} has no commit of a training run")
        trainer = _Trainer(store, config, rows)
        print(_READY, flush=True)
        for _ in sys.stdin:
            print(json.dumps(trainer.commit()._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
