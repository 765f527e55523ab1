"""How long does a commit hold up training, and does the file of a run that commits for ever level off?

A model trains on random ids. Before each run of steps everything that was trained since the last is committed: not at
all, in the background, or waited for; the three take turns. The stall of a background commit is the time in which the
loop stands still for it: the call, and waiting for its writer. Beside that, steps are slower while cores and disk are
shared with it; that is told apart.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tierstore

from .common import Goal, Report, Run, Spread, Table, program
from .workload import Batches

__all__ = ["Training", "run"]

Batch = tuple[torch.Tensor, torch.Tensor]
_BATCHES = 400
"""Then the same again."""


class Stall(NamedTuple):
    """Of one background commit, in seconds."""

    call: float
    waited: float
    slower_steps: float
    """What the steps beside it took longer, waiting included."""
    write: float
    rows: int

    @property
    def total(self) -> float:
        return self.call + self.waited


class Training:
    """Steps of a small model over one table, as many as wanted."""

    def __init__(self, store: tierstore.Store, config: dict[str, Any]) -> None:
        table = store.create_table(
            tierstore.TableConfig(
                name="item",
                num_embeddings=config["rows"],
                embedding_dim=config["dim"],
                optimizer=tierstore.optim.RowWiseAdagrad(lr=0.05),
            )
        )
        torch.manual_seed(config["seed"])
        self._store = store
        self._bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        self._model = torch.nn.Sequential(
            torch.nn.Linear(config["dim"], config["hidden"]), torch.nn.ReLU(), torch.nn.Linear(config["hidden"], 1)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._batches = tierstore.prefetch(_batches(config), self._bag, depth=config["depth"], features=lambda b: b)

    def step(self) -> float:
        """Seconds of one step, its batch included."""
        start = time.perf_counter()
        ids, offsets = next(self._batches)
        loss = self._model(self._bag(ids, offsets)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - start

    def commit(self) -> "tierstore.store.commits.PendingCommit":
        return self._store.commit_async(tensors=dict(self._model.named_parameters()))

    def close(self) -> None:
        self._batches.close()


def _batches(config: dict[str, Any]) -> Iterator[Batch]:
    """Bags of ``pooling_factor`` ids each, drawn by a power law and scattered over the table."""
    names = ("rows", "batch", "pooling_factor", "seed")
    found = Batches(tables=1, exponent=config["zipf"], count=_BATCHES, **{name: config[name] for name in names})
    return cycle((values, found.offsets[:-1]) for values in found.values)


def _background(training: Training, store: tierstore.Store, steps: int, base: float) -> Stall:
    """One commit and the steps beside it; ``base`` is what a step takes without."""
    before = store.stats()
    start = time.perf_counter()
    pending = training.commit()
    call = time.perf_counter() - start
    ended: list[float] = []
    pending.add_done_callback(lambda _: ended.append(time.perf_counter()))
    during = []
    taken = 0
    while taken < steps or not pending.done():
        is_beside = not pending.done()
        seconds = training.step()
        taken += 1
        if is_beside:
            during.append(seconds)
    pending.result()
    slower = sum(seconds - base for seconds in during)
    after = store.stats()
    waited = after.ddr.waited_seconds - before.ddr.waited_seconds
    return Stall(call, waited, slower, ended[0] - start, after.ssd.rows_written - before.ssd.rows_written)


class Waited(NamedTuple):
    """A commit that was waited for."""

    seconds: float
    rows: int


def _waited(training: Training, store: tierstore.Store) -> Waited:
    before, start = store.stats().ssd.rows_written, time.perf_counter()
    training.commit().result()
    return Waited(time.perf_counter() - start, store.stats().ssd.rows_written - before)


def _measure(config: dict[str, Any], folder: Path) -> tuple[list[float], list[Stall], list[Waited]]:
    """(medians of steps without a commit, background commits, commits that were waited for)."""
    alone: list[float] = []
    stalls: list[Stall] = []
    waited: list[Waited] = []
    with tierstore.open(folder, ddr=config["ddr"]) as store:
        training = Training(store, config)
        try:
            for _ in range(config["steps"]):
                training.step()
            for _ in range(config["repetitions"]):
                alone.append(statistics.median(training.step() for _ in range(config["steps"])))
                stalls.append(_background(training, store, config["steps"], alone[-1]))
                waited.append(_waited(training, store))
                for _ in range(config["steps"]):
                    training.step()
        finally:
            training.close()
    return alone, stalls, waited


def _growth(config: dict[str, Any], folder: Path, part: int) -> list[int]:
    """Bytes of the row file after a first commit of all rows, and after each that rewrote a ``part``-th of them."""
    rows, sizes = torch.arange(config["growth_rows"]), []
    generator = torch.Generator().manual_seed(config["seed"])
    with tierstore.open(folder, ddr=config["growth_ddr"]) as store:
        table = store.create_table(
            tierstore.TableConfig(name="item", num_embeddings=len(rows), embedding_dim=config["dim"])
        )
        for number in range(config["growth_commits"] + 1):
            ids = torch.randperm(len(rows), generator=generator)[: len(rows) // part] if number else rows
            table.write(ids, torch.full((len(ids), config["dim"]), float(number)))
            store.commit()
            sizes.append((folder / "rows.lmdb").stat().st_size)
        store.verify()
    return sizes


def _apart(folder: Path, measure: Callable[[Path], Any]) -> Any:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(name: str, seconds: list[float]) -> list[str]:
    spread = Spread.of(seconds)
    return [name, *(f"{1000 * value:,.1f}" for value in (spread.median, spread.lowest, spread.highest))]


def _note(config: dict[str, Any], stalls: list[Stall]) -> str:
    rows = statistics.median(stall.rows for stall in stalls)
    worst = max(stalls, key=lambda stall: stall.total)
    return (
        f"{config['rows']:,} rows of {config['dim']} float32 with row-wise Adagrad, {config['ddr']} of DDR, batches of "
        f"{config['batch']:,} bags of {config['pooling_factor']} ids (Zipf {config['zipf']}), {config['steps']} steps "
        f"between commits; beside a background commit {rows:,.0f} rows were written (median, evicted ones included). "
        f"The worst stall was {1000 * worst.total:,.0f} ms, {worst.total / worst.write:.2f} of its write time. Steps "
        "beside a commit share both cores and the disk with it, and are slower by "
        f"{statistics.median(stall.slower_steps / stall.write for stall in stalls):.2f} of its write time (median)."
    )


def run(request: Run) -> Report:
    """Run it."""
    config = request.config
    alone, stalls, waited = _apart(request.folder / "commit", lambda folder: _measure(config, folder))
    parts = (1, config["growth_part"])
    growth = [_apart(request.folder / "growth", lambda folder: _growth(config, folder, part)) for part in parts]  # noqa: B023
    shares = [stall.total / stall.write for stall in stalls]
    times = Table(
        title="a commit and the training loop, ms",
        columns=["", "median", "lowest", "highest"],
        rows=[
            _row("a step, no commit under way", alone),
            _row("background: the call", [stall.call for stall in stalls]),
            _row("background: waiting for its writer", [stall.waited for stall in stalls]),
            _row("background: stall, both together", [stall.total for stall in stalls]),
            _row("background: steps slower until it is durable", [stall.slower_steps for stall in stalls]),
            _row("background: full write time", [stall.write for stall in stalls]),
            _row("waited for: full write time, which is its stall", [each.seconds for each in waited]),
        ],
    )
    shown = [number for number in (0, 1, 2, 5, 10, 20, 50, 100, 200) if number < len(growth[0])]
    sizes = Table(
        title="the row file after further commits, of its size after the first, by the rows that each rewrites",
        columns=["commits", "all rows", f"one in {parts[1]}, at random"],
        rows=[[f"{number:,}", *(f"{each[number] / each[0]:.2f}" for each in growth)] for number in shown],
    )
    return Report(
        question="How long does a commit hold up training, and does the file of a run that commits for ever level off?",
        tables=[times, sizes],
        figures={
            "step_seconds": alone,
            "stalls": [stall._asdict() | {"total": stall.total} for stall in stalls],
            "waited": [each._asdict() for each in waited],
            "file_bytes": growth[0],
            "file_bytes_of_parts": growth[1],
        },
        goals=[
            Goal(
                name="median stall of a background commit, of its full write time",
                value=statistics.median(shares),
                at_most=0.1,
            ),
            Goal(
                name="steps slower beside a commit, of its write time, median",
                value=round(statistics.median(stall.slower_steps / stall.write for stall in stalls), 3),
                at_most=0.2,
            ),
            Goal(
                name="largest file while commits rewrite all rows, of the first",
                value=round(max(growth[0]) / growth[0][0], 3),
                at_most=2.2,
            ),
            Goal(
                name=f"largest file while each rewrites one row in {parts[1]}, of the first",
                value=round(max(growth[1]) / growth[1][0], 3),
                at_most=1.5,
            ),
        ],
        notes=[_note(config, stalls)],
    )


if __name__ == "__main__":
    sys.exit(program("commit", run))
