"""Steps over the ranks that run now, timed: what ``RankCosts`` are found from. Every rank makes the same calls.

A probe has one group of tables, all rows in memory. Sets of tables are drawn: how many, their columns, rows, ids a bag,
how often ids repeat, and where each table is. A trial makes a set's tables and takes a few steps. All sets are tried in
each of some rounds, in another order, and a probe's time is the median over rounds, as others use the machine too.
"""

import copy
import itertools
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

from ...config import TableConfig
from ...kernels.arrays import Float64s, Int64s
from ...nn.jagged import KeyedJaggedTensor
from ...optim import Optimizer
from ...optim.configs import RULES, RuleName
from ...trace import TableTrace, Trace
from ..modules import ShardedTieredEmbeddingBagCollection, data_parallel
from ..plan import Sharding
from ..ranks import Ranks, ranks_on_host
from ..store import open_sharded
from .costs import Group, Probe, RankCosts, amounts_of, demand_of, group_of

_ROUNDS: Final = 3
_BATCHES: Final = 3
_STEPS: Final = 5
"""Of a trial, after two that warm it."""
_FEWEST_SETS: Final = 4
_HELD_OUT: Final = 5
"""Each so manieth set is not fitted, and what is predicted of it is compared with what it takes."""
_TABLES_BYTES: Final = 64 << 20
"""Of a set's weights at most: more than processors' caches hold."""
_MOST_IDS: Final = 60_000
"""Of a rank's batch."""
_MOST_ID_COLUMNS: Final = 6_000_000
_OTHER_BYTES: Final = 16 << 20
"""That are read and written between steps, as a model does: then few rows are still in the processor's own caches."""
_PRIME: Final = 2654435761
"""No table has so many rows: times it, rows are a permutation of rows."""


def measure_ranks(
    *,
    optimizer: RuleName = "rowwise_adagrad",
    seconds: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> RankCosts:
    """Time probes over all ranks of ``torch.distributed``; collective. ValueError: a wrong argument.

    Args:
        seconds: to spend, about; the more, the more sets of tables are tried, 4 at least.
        progress: is given the seconds that have passed, and ``seconds``.
    """
    if optimizer not in RULES:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(RULES)}")
    ranks, rule = Ranks(), RULES[optimizer]()
    seconds = ranks.first(seconds)
    if not math.isfinite(seconds):
        raise ValueError(f"seconds={seconds}: expected a number of seconds")
    trials, works = dict[tuple[int, int], list[float]](), dict[tuple[int, int], tuple[Group, Float64s]]()
    begun = time.monotonic()

    def tried(seed: int) -> float:
        """The seconds that have passed, on all ranks, after trials of one set."""
        subject = _Subject(ranks, rule, seed)
        for place, own in enumerate(subject.plans()):
            trials.setdefault((seed, place), []).append(subject.step_s(own))
            if (seed, place) not in works:
                works[seed, place] = subject.work(own)
        passed = max(ranks.gather(time.monotonic() - begun))
        if progress is not None:
            progress(int(min(passed, seconds)), int(seconds))
        return passed

    tried(0)  # compiles what it needs
    trials.clear()
    begun, reduces = time.monotonic(), [[_reduce_us(ranks, is_busy=is_busy) for is_busy in (False, True)]]
    sets = next(sets for sets in itertools.count(1) if tried(sets - 1) >= seconds / _ROUNDS and sets >= _FEWEST_SETS)
    for number in range(1, _ROUNDS):
        reduces.append([_reduce_us(ranks, is_busy=is_busy) for is_busy in (False, True)])
        for seed in np.random.default_rng(number).permutation(sets).tolist():
            tried(seed)
    probes = {key: Probe(*works[key], statistics.median(taken)) for key, taken in trials.items()}
    is_apart = sets >= 2 * _HELD_OUT
    held_out = [probe for (seed, _), probe in probes.items() if is_apart and seed % _HELD_OUT == 0]
    fitted = [probe for (seed, _), probe in probes.items() if not is_apart or seed % _HELD_OUT]
    local = ranks_on_host(ranks.size)
    cores = len(set[int]().union(*ranks.gather(os.sched_getaffinity(0))[:local]))
    where = f"{ranks.size} ranks, {local} on each host of {cores} cores as {platform.node()}"
    reduce_us, reduce_busy_us = map(statistics.median, zip(*reduces, strict=True))
    return RankCosts.fitted(
        fitted, held_out=held_out, world_size=ranks.size, local_world_size=local, cores=cores, optimizer=optimizer,
        source=f"tierstore shard measure, {where}; {len(probes)} steps of {sets} sets of tables",
        reduce_us=reduce_us, reduce_busy_us=reduce_busy_us,
    )  # fmt: skip


class _Subject:
    """A set of tables of one width, drawn by a seed, and batches; all ranks draw the same ones."""

    def __init__(self, ranks: Ranks, rule: Optimizer, seed: int) -> None:
        self._ranks, self._generator = ranks, np.random.default_rng(seed)
        draw, count = self._generator.uniform, round(2 ** self._generator.uniform(0, 5))
        self._dim, names = int(2 ** self._generator.integers(2, 8)), [f"t{n}" for n in range(count)]
        factors = np.where(draw(size=count) < 0.5, 1, 2 ** draw(0, 5 * (draw() < 0.7), count)).astype(np.int64)
        most = min(_MOST_IDS, _MOST_ID_COLUMNS / self._dim) / factors.sum()
        self._samples = max(8, int(min(2 ** draw(5, 11.5), most)))
        num_rows = 10 ** draw(2, 5.7, count)
        num_rows *= min(1.0, _TABLES_BYTES / (num_rows.sum() * 4 * self._dim))
        self._tables = [
            TableConfig(name=name, num_embeddings=max(2, int(rows)), embedding_dim=self._dim, optimizer=rule)
            for name, rows in zip(names, num_rows, strict=True)
        ]
        self._ids = [
            _zipf(self._generator, table.num_embeddings, draw(0, 1.3), (_BATCHES, ranks.size, self._samples * factor))
            for table, factor in zip(self._tables, factors.tolist(), strict=True)
        ]
        self._factors = factors
        lengths = torch.from_numpy(factors).repeat_interleave(self._samples)
        own = ([each[number, ranks.rank] for each in self._ids] for number in range(_BATCHES))
        self._batches = [KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(e)), lengths=lengths) for e in own]

    def plans(self) -> list[list[Sharding]]:
        """Of one group each: rows or bags of tables that are by rows or whole, by chance, once evenly and once not;
        columns; and copies."""
        size, generator = self._ranks.size, self._generator
        every, tables = tuple(range(size)), range(len(self._tables))
        found = [[Sharding("data_parallel", every)] * len(tables)]
        for exchange in ("rows", "rows", "pooled", "pooled"):
            share, most = generator.choice([0.0, 0.5, 1.0]), 1 if generator.random() < 0.25 else size
            by_rows, places = generator.random(len(tables)) < share, (np.arange(len(tables)) + generator.integers(size))
            found.append([
                Sharding("row_wise", every, exchange)
                if by_rows[table]
                else Sharding("table_wise", (int(places[table]) % most,), exchange)
                for table in tables
            ])  # fmt: skip
        parts = [count for count in (2, 4, 8, 16) if count <= size and self._dim // count >= 4]
        if parts:
            count = int(generator.choice(parts))
            of_table = [tuple((table + place) % size for place in range(count)) for table in tables]
            found.append([Sharding("column_wise", own) for own in of_table])
        return found

    def step_s(self, shardings: Sequence[Sharding]) -> float:
        """Median of some steps, each as long as in its slowest rank."""
        table_bytes = sum(table.size_bytes(4096) for table in self._tables)
        with open_sharded(cold="memory", ddr=4 * table_bytes + (64 << 20)) as store:
            for table, sharding in zip(self._tables, shardings, strict=True):
                store.create_table(table, **sharding._asdict())
            module = ShardedTieredEmbeddingBagCollection(store)
            gradient = torch.full((self._samples, len(self._tables) * self._dim), 1e-3)
            other, found = torch.zeros(_OTHER_BYTES // 4), []
            for number in range(2 + _STEPS):
                other.add_(1)
                begun = time.perf_counter()
                module(self._batches[number % _BATCHES]).values().backward(gradient)
                found.append(time.perf_counter() - begun)
            steps: list[float] = [max(step) for step in zip(*self._ranks.gather(found), strict=True)]
            return statistics.median(steps[2:])

    def work(self, shardings: Sequence[Sharding]) -> tuple[Group, Float64s]:
        """Of a plan's one group, as ``Probe`` has it."""
        size, samples = self._ranks.size, self._samples
        tables = {
            table.name: TableTrace(ids.ravel(), np.arange(0, ids.size + 1, factor))
            for table, ids, factor in zip(self._tables, self._ids, self._factors.tolist(), strict=True)
        }
        demand = demand_of(Trace(tables=tables, batch_samples=size * samples), self._tables, size).tables.values()
        amounts = [
            amounts_of(sharding, self._dim, own, bags=samples, ranks=size)
            for sharding, own in zip(shardings, demand, strict=True)
        ]
        return group_of(shardings[0], self._dim), np.sum(amounts, axis=0)


def _zipf(generator: np.random.Generator, num_rows: int, exponent: float, size: tuple[int, ...]) -> Int64s:
    """Rows by a bounded power law, the popular ones anywhere in the table."""
    power = 1 - exponent
    places = ((num_rows**power - 1) * generator.random(size) + 1) ** (1 / power)
    found: Int64s = (places.astype(np.int64) - 1) * _PRIME % num_rows
    return found


def _reduce_us(ranks: Ranks, *, is_busy: bool) -> float:
    """What ``data_parallel`` adds to forward and backward of a small model; while a thread is busy, or not."""
    alone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    together, values, is_over = data_parallel(copy.deepcopy(alone)), torch.ones(64, 64), threading.Event()

    def work() -> None:
        busy = torch.ones(1 << 18)
        while is_busy and not is_over.is_set():
            busy.mul_(1.0)

    def step_s(model: nn.Module) -> float:
        taken = []
        for _ in range(40):
            begun = time.perf_counter()
            model(values).sum().backward()
            taken.append(time.perf_counter() - begun)
        return max(ranks.gather(statistics.median(taken)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return 1e6 * max(step_s(together) - step_s(alone), 0.0)
    finally:
        is_over.set()
        thread.join()
