"""How fast is a backup, and how much does it slow training?

A store, every row of which was written, is copied as a backup and as a plain copy of its row file, read from end to end
and synced. The plain copy is the limit: made of an open store it would be worth nothing. Both are made with nothing
else going on, and beside training with background commits; they take turns, and neither finds the file in the system's
cache.
"""

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

import tierstore

from .commit import Training
from .common import Goal, Report, Run, Spread, Table, program
from .oscache import drop

__all__ = ["run"]

_CHUNK_ROWS = 200_000


def _copy_file(source: Path, target: Path) -> None:
    target.mkdir()
    path = target / source.name
    shutil.copyfile(source, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class _Subject:
    """A store, copied in turns, alone and beside training."""

    def __init__(self, request: Run) -> None:
        self._folder = request.folder / "backup_store"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._steps = request.config["steps"]
        self._store = tierstore.open(self._folder / "store", ddr=request.config["ddr"])
        self._training = Training(self._store, request.config)
        table = self._store["item"]
        for first in range(0, request.config["rows"], _CHUNK_ROWS):
            ids = torch.arange(first, min(first + _CHUNK_ROWS, request.config["rows"]))
            table.write(ids, torch.randn(len(ids), request.config["dim"]))
        self._store.commit()
        self._rows_file = self._folder / "store" / "rows.lmdb"
        self.actions: dict[str, Callable[[Path], object]] = {
            "plain copy": lambda target: _copy_file(self._rows_file, target),
            "backup": self._store.backup,
        }

    @property
    def size_bytes(self) -> int:
        return self._rows_file.stat().st_size

    def alone(self, name: str) -> float:
        """Bytes a second."""
        drop(self._rows_file)
        return self._timed(name)

    def _timed(self, name: str) -> float:
        target = self._folder / "copy"
        start = time.perf_counter()
        self.actions[name](target)
        rate = self.size_bytes / (time.perf_counter() - start)
        shutil.rmtree(target)
        return rate

    def steps(self) -> float:
        """Seconds of a step with nothing beside, the mean."""
        self._training.commit()
        return statistics.fmean(self._training.step() for _ in range(self._steps))

    def beside(self, name: str) -> tuple[float, float]:
        """Bytes a second, and the mean of the steps beside it."""
        drop(self._rows_file)
        self._training.commit()
        taken: list[float] = []
        with ThreadPoolExecutor(1) as thread:
            copy = thread.submit(self._timed, name)
            while not (taken and copy.done()):
                taken.append(self._training.step())
            return copy.result(), statistics.fmean(taken)

    def close(self) -> None:
        self._training.close()
        self._store.close()
        shutil.rmtree(self._folder)


def run(request: Run) -> Report:
    subject = _Subject(request)
    names = list(subject.actions)
    alone: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in ("nothing", *names)}
    subject.steps()
    for _ in range(request.config["repetitions"]):
        for name in names:
            alone[name].append(subject.alone(name))
        steps["nothing"].append(subject.steps())
        for name in names:
            rate, seconds = subject.beside(name)
            rates[name].append(rate)
            steps[name].append(seconds)
    size_bytes = subject.size_bytes
    subject.close()
    spreads = {name: Spread.of(values) for name, values in steps.items()}
    shown = {name: (Spread.of(alone[name]), Spread.of(rates[name])) for name in names}
    return Report(
        question="How fast is a backup, and how much does it slow training?",
        tables=[
            Table(
                title=f"copies of a row file of {size_bytes / 1e6:,.0f} MB, MB/s, and steps beside them",
                columns=["", "alone", "beside training", "a step beside it, ms"],
                rows=[
                    ["nothing", "", "", _ms(spreads["nothing"])],
                    *([name, _rate(shown[name][0]), _rate(shown[name][1]), _ms(spreads[name])] for name in names),
                ],
            )
        ],
        figures={
            "size_bytes": size_bytes,
            "step_seconds": {name: asdict(spread) for name, spread in spreads.items()},
            "bytes_a_second": {name: [asdict(each) for each in pair] for name, pair in shown.items()},
        },
        goals=[
            Goal(
                name="backup alone over a plain copy",
                value=round(shown["backup"][0].median / shown["plain copy"][0].median, 3),
                at_least=0.9,
            )
        ],
        notes=[
            f"Medians of {request.config['repetitions']}, lowest and highest behind them. A model trains on batches of "
            f"{request.config['batch']:,} bags of {request.config['pooling_factor']} ids, rows beyond "
            f"{request.config['ddr']} on SSD, and commits in the background as each copy begins."
        ],
    )


def _rate(spread: Spread) -> str:
    return f"{spread.median / 1e6:,.0f} ({spread.lowest / 1e6:,.0f} - {spread.highest / 1e6:,.0f})"


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.1f} ({spread.lowest * 1e3:.1f} - {spread.highest * 1e3:.1f})"


if __name__ == "__main__":
    sys.exit(program("backup", run))
