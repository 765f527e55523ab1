"""How long does a commit hold up training, and does the file of a run that commits for ever level off?

A model trains on random ids. Before each run of steps everything that was trained since the last is committed: not at
all, in the background, or waited for; the three take turns. The stall of a background commit is the time in which the
loop stands still for it: the call, and waiting for its writer. Beside that, steps are slower while cores and disk are
shared with it; that is told apart.
"""

import statistics
import time
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tierstore

from .common import Goal, Report, Run, Table, fresh_folder, start
from .workload import Batches

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
        shape = {"num_embeddings": config["rows"], "embedding_dim": config["dim"]}
        rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
        table = store.create_table(tierstore.TableConfig(name="item", optimizer=rule, **shape))
        torch.manual_seed(config["seed"])
        self._store = store
        self._bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        self._model = torch.nn.Sequential(
            torch.nn.Linear(config["dim"], config["hidden"]), torch.nn.ReLU(), torch.nn.Linear(config["hidden"], 1)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        names = ("rows", "batch", "pooling_factor", "seed")
        found = Batches(tables=1, exponent=config["zipf"], count=_BATCHES, **{name: config[name] for name in names})
        batches = cycle((values, found.offsets[:-1]) for values in found.values)
        self._batches = tierstore.prefetch(batches, self._bag, depth=config["depth"], features=lambda batch: batch)

    def step(self) -> float:
        """Seconds of one step, its batch included."""
        begun = time.perf_counter()
        ids, offsets = next(self._batches)
        loss = self._model(self._bag(ids, offsets)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - begun

    def commit(self) -> "tierstore.store.commits.PendingCommit":
        return self._store.commit_async(tensors=dict(self._model.named_parameters()))

    def close(self) -> None:
        self._batches.close()


def _background(training: Training, store: tierstore.Store, steps: int, base: float) -> Stall:
    """One commit and the steps beside it; ``base`` is what a step takes without."""
    before, begun = store.stats(), time.perf_counter()
    pending = training.commit()
    call, ended, beside = time.perf_counter() - begun, list[float](), list[float]()
    pending.add_done_callback(lambda _: ended.append(time.perf_counter()))
    while not pending.done():
        beside.append(training.step())
    for _ in range(steps - len(beside)):
        training.step()
    pending.result()
    slower = sum(seconds - base for seconds in beside)
    after = store.stats()
    waited = after.ddr.waited_seconds - before.ddr.waited_seconds
    return Stall(call, waited, slower, ended[0] - begun, after.ssd.rows_written - before.ssd.rows_written)


def _measure(config: dict[str, Any], folder: Path) -> tuple[list[float], list[Stall], list[float]]:
    """Medians of steps without a commit, background commits, and seconds of commits that were waited for."""
    alone, stalls, waited = list[float](), list[Stall](), list[float]()
    with tierstore.open(folder, ddr=config["ddr"]) as store:
        training = Training(store, config)
        try:
            for _ in range(config["steps"]):
                training.step()
            for _ in range(config["repetitions"]):
                alone.append(statistics.median(training.step() for _ in range(config["steps"])))
                stalls.append(_background(training, store, config["steps"], alone[-1]))
                begun = time.perf_counter()
                training.commit().result()
                waited.append(time.perf_counter() - begun)
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


def _row(name: str, seconds: list[float]) -> list[str]:
    return [name, *(f"{1000 * value:,.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds)))]


def _note(config: dict[str, Any], stalls: list[Stall], slower: float) -> str:
    rows = statistics.median(stall.rows for stall in stalls)
    worst = max(stalls, key=lambda stall: stall.total)
    return (
        f"{config['rows']:,} rows of {config['dim']} float32 with row-wise Adagrad, {config['ddr']} of DDR, batches of "
        f"{config['batch']:,} bags of {config['pooling_factor']} ids (Zipf {config['zipf']}), {config['steps']} steps "
        f"between commits; beside a background commit {rows:,.0f} rows were written (median, evicted ones included). "
        f"The worst stall was {1000 * worst.total:,.0f} ms, {worst.total / worst.write:.2f} of its write time. Steps "
        f"beside a commit share both cores and the disk with it, and are slower by {slower:.2f} of its write time "
        "(median)."
    )


def run(request: Run) -> Report:
    config, growth = request.config, []
    with fresh_folder(request.folder / "commit") as folder:
        alone, stalls, waited = _measure(config, folder)
    for part in (1, config["growth_part"]):
        with fresh_folder(request.folder / "growth") as folder:
            growth.append(_growth(config, folder, part))
    largest = [round(max(each) / each[0], 3) for each in growth]
    times = [
        _row("a step, no commit under way", alone),
        _row("background: the call", [stall.call for stall in stalls]),
        _row("background: waiting for its writer", [stall.waited for stall in stalls]),
        _row("background: stall, both together", [stall.total for stall in stalls]),
        _row("background: steps slower until it is durable", [stall.slower_steps for stall in stalls]),
        _row("background: full write time", [stall.write for stall in stalls]),
        _row("waited for: full write time, which is its stall", waited),
    ]
    shown = [number for number in (0, 1, 2, 5, 10, 20, 50, 100, 200) if number < len(growth[0])]
    sizes = [[f"{number:,}", *(f"{each[number] / each[0]:.2f}" for each in growth)] for number in shown]
    title = "the row file after further commits, of its size after the first, by the rows that each rewrites"
    some = f"one in {config['growth_part']}"
    stall = statistics.median(stall.total / stall.write for stall in stalls)
    slower = statistics.median(stall.slower_steps / stall.write for stall in stalls)
    return Report(
        [
            Table("a commit and the training loop, ms", ["", "median", "lowest", "highest"], times),
            Table(title, ["commits", "all rows", f"{some}, at random"], sizes),
        ],
        [
            Goal("median stall of a background commit, of its full write time", stall, at_most=0.1),
            Goal("steps slower beside a commit, of its write time, median", round(slower, 3), at_most=0.2),
            Goal("largest file while commits rewrite all rows, of the first", largest[0], at_most=2.2),
            Goal(f"largest file while each rewrites one row in {config['growth_part']}, of the first", largest[1],
                 at_most=1.5),
        ],
        [_note(config, stalls, slower)],
        {
            "step_seconds": alone,
            "stalls": [each._asdict() | {"total": each.total} for each in stalls],
            "waited": waited,
            "file_bytes": growth[0],
            "file_bytes_of_parts": growth[1],
        },
    )  # fmt: skip


if __name__ == "__main__":
    start("commit")
