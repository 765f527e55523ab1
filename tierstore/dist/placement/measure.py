"""Steps over the ranks that run now, timed: what ``RankCosts`` are found from. Every rank makes the same calls.

A probe has one group of tables, all rows in memory. Probes differ in columns, tables, samples, ids a bag and how often
ids repeat; in each, rows are over all ranks alike and on the first one alone, so that an owner's work is separate from
a requester's. They are timed in short trials, all probes in each round and in another order, as others use the machine
too: what slows it for seconds is then in one trial of many probes and not in all of one.
"""

import copy
import itertools
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn

from ...config import TableConfig
from ...kernels.arrays import Int64s
from ...nn import KeyedJaggedTensor
from ...optim import Optimizer
from ...trace import TableTrace, Trace
from ..collection import ShardedTieredEmbeddingBagCollection, data_parallel
from ..plan import Exchange, Sharding, ShardingType
from ..ranks import Ranks
from ..store import open_sharded
from .costs import OPTIMIZERS, OptimizerName, Probe, RankCosts, amounts_of, demand_of, group_of

_ROUNDS: Final = 2
_BATCHES: Final = 4
_MOST_STEPS: Final = 100
_TABLES_BYTES: Final = 128 << 20
"""Of a probe's weights: more than processors' caches hold. With state and index they take up to eight times as much."""
_OTHER_BYTES: Final = 16 << 20
"""That are read and written between steps, as a model does: then few rows are still in the processor's own caches."""
_PRIME: Final = 2654435761
"""No table has so many rows: times it, rows are a permutation of rows."""


class _Shape(NamedTuple):
    """Of a probe's tables and batches; ``samples`` of a rank's batch, ``exponent`` of Zipf's law, which is not 1."""

    tables: int
    samples: int
    pooling_factor: int
    exponent: float


_SHAPES: Final = (
    _Shape(2, 64, 1, 0.0),
    _Shape(4, 1024, 16, 0.4),
    _Shape(24, 2048, 1, 1.2),
    _Shape(8, 2048, 1, 0.0),
    _Shape(8, 2048, 8, 1.05),
    _Shape(24, 512, 1, 0.8),
)
_DIMS: Final = (16, 64, 128)
"""Of columns; a shape has one of them, or two if there is time."""
_FORMS: Final[tuple[tuple[ShardingType, Exchange], ...]] = (
    ("row_wise", "rows"),
    ("row_wise", "pooled"),
    ("table_wise", "pooled"),
    ("column_wise", "rows"),
    ("data_parallel", "rows"),
)


def measure_ranks(
    *,
    optimizer: OptimizerName = "rowwise_adagrad",
    seconds: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> RankCosts:
    """Time probes over all ranks of ``torch.distributed``; collective.

    Args:
        seconds: to spend in steps, about, besides making their tables, which takes half a minute, more with more
            ranks. With fewer than 60 there are half as many probes, of smaller tables.
        progress: is given the trials done, and how many there are.

    Raises:
        ValueError: a wrong argument. Others as of ``open_sharded``.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
    ranks, share = Ranks(), min(1.0, seconds / 60)
    probes = list(
        _probes(ranks, OPTIMIZERS[optimizer](), max(1 << 16, int(share * _TABLES_BYTES)), dims=1 + int(share))
    )
    trials, reduces = [list[float]() for _ in probes], list[tuple[float, float]]()
    for number in range(_ROUNDS):
        reduces.append((_reduce_us(ranks, is_busy=False), _reduce_us(ranks, is_busy=True)))
        for done, place in enumerate(np.random.default_rng(number).permutation(len(probes)), number * len(probes) + 1):
            subject, shardings = probes[place]
            trials[place].append(subject.step_s(shardings, seconds / (_ROUNDS * len(probes))))
            if progress is not None:
                progress(done, _ROUNDS * len(probes))
    timed = [subject.probe(own, statistics.median(taken)) for (subject, own), taken in zip(probes, trials, strict=True)]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    cores = len(set[int]().union(*ranks.gather(os.sched_getaffinity(0))[:local]))
    where = f"{ranks.size} ranks, {local} on each host of {cores} cores as {platform.node()}"
    reduce_us, reduce_busy_us = map(statistics.median, zip(*reduces, strict=True))
    return RankCosts.fitted(
        timed, world_size=ranks.size, local_world_size=local, cores=cores, optimizer=optimizer,
        source=f"tierstore shard measure, {where}", reduce_us=reduce_us, reduce_busy_us=reduce_busy_us,
    )  # fmt: skip


def _probes(
    ranks: Ranks, rule: Optimizer, tables_bytes: int, *, dims: int
) -> Iterator[tuple["_Subject", list[Sharding]]]:
    """Tables and where they are, of each probe; ``dims``: of each shape."""
    for (number, shape), beyond in itertools.product(enumerate(_SHAPES), range(dims)):
        subject = _Subject(ranks, rule, shape, _DIMS[(number + beyond) % len(_DIMS)], tables_bytes)
        for sharding_type, exchange in _FORMS:
            for owners in [ranks.size] if sharding_type in ("data_parallel", "column_wise") else [ranks.size, 1]:
                every, is_whole = tuple(range(owners)), sharding_type == "table_wise"
                places = [(table % owners,) if is_whole else every for table in range(shape.tables)]
                yield subject, [Sharding(sharding_type, place, exchange) for place in places]


class _Subject:
    """A probe's tables and batches; all ranks draw the same ones."""

    def __init__(self, ranks: Ranks, rule: Optimizer, shape: _Shape, dim: int, tables_bytes: int) -> None:
        self._ranks, self._shape, self._dim, self._ddr = ranks, shape, dim, 8 * tables_bytes + (64 << 20)
        num_rows, names = max(2, tables_bytes // (shape.tables * 4 * dim)), [f"t{n}" for n in range(shape.tables)]
        self._tables = [
            TableConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, optimizer=rule) for name in names
        ]
        generator, size = np.random.default_rng(dim), (_BATCHES, ranks.size, shape.samples * shape.pooling_factor)
        ids = {name: _zipf(generator, num_rows, shape.exponent, size) for name in names}
        offsets = np.arange(0, ids["t0"].size + 1, shape.pooling_factor)
        tables = {name: TableTrace(own.ravel(), offsets) for name, own in ids.items()}
        demand = demand_of(Trace(tables=tables, batch_samples=ranks.size * shape.samples), self._tables, ranks.size)
        self._demands = demand.tables.values()
        lengths = torch.full((len(names) * shape.samples,), shape.pooling_factor, dtype=torch.int64)
        own = ([each[number, ranks.rank] for each in ids.values()] for number in range(_BATCHES))
        self._batches = [KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(e)), lengths=lengths) for e in own]

    def step_s(self, shardings: Sequence[Sharding], seconds: float) -> float:
        """Median of the steps that fit in so many seconds, each as long as in its slowest rank."""
        with open_sharded(cold="memory", ddr=self._ddr) as store:
            for table, sharding in zip(self._tables, shardings, strict=True):
                store.create_table(table, **sharding._asdict())
            module = ShardedTieredEmbeddingBagCollection(store)
            gradient = torch.full((self._shape.samples, len(self._tables) * self._dim), 1e-3)
            other = torch.zeros(_OTHER_BYTES // 4)

            def timed(steps: int) -> list[float]:
                found = []
                for number in range(steps):
                    other.add_(1)
                    begun = time.perf_counter()
                    module(self._batches[number % _BATCHES]).values().backward(gradient)
                    found.append(time.perf_counter() - begun)
                return [max(step) for step in zip(*self._ranks.gather(found), strict=True)]

            warm = min(timed(_BATCHES))
            return statistics.median(timed(max(_BATCHES, min(_MOST_STEPS, int(seconds / warm)))))

    def probe(self, shardings: Sequence[Sharding], seconds: float) -> Probe:
        amounts = [
            amounts_of(sharding, self._dim, demand, bags=self._shape.samples, ranks=self._ranks.size)
            for sharding, demand in zip(shardings, self._demands, strict=True)
        ]
        return Probe(group_of(shardings[0], self._dim), np.sum(amounts, axis=0), seconds)


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
