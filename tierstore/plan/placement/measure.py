"""Steps over the ranks that run now, timed: what ``RankCosts`` are found from. Every rank makes the same calls.

Each probe has one group of tables, all rows in memory. Probes differ in columns, tables, samples, ids a bag and how
often ids repeat; in each, rows are over all ranks alike and on the first one alone, so that an owner's work can be told
from an asker's. They are timed in short trials, all probes in each round and in another order, as others use the
machine too: what slows it for seconds is then in one trial of many probes and not in all of one.
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
from ...dist import ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from ...dist.plan import Exchange, Sharding, ShardingType
from ...dist.ranks import Ranks
from ...kernels.arrays import Int64s
from ...nn import KeyedJaggedTensor
from ..traces.zipf import draw_zipf
from ..workload import OPTIMIZERS, OptimizerName, TableShape
from .costs import Amounts, Probe, RankCosts, amounts_of, kind_of
from .demand import TableDemand

_ROUNDS: Final = 2
_BATCHES: Final = 4
_OTHER_BYTES: Final = 16 << 20
"""That are read and written between steps, as a model does: then few rows are still in the processor's own caches."""
_MOST_STEPS: Final = 100
_LR: Final = 0.01
_BOOKS_BYTES: Final = 64
"""Beside a row."""
_STAGING_BYTES: Final = 64 << 20


class Shape(NamedTuple):
    """Of a probe's tables and batches.

    Attributes:
        samples: of a rank's batch.
    """

    tables: int
    samples: int
    pooling_factor: int
    exponent: float


_SHAPES: Final = (
    Shape(2, 64, 1, 0.0),
    Shape(4, 1024, 16, 0.4),
    Shape(24, 2048, 1, 1.2),
    Shape(8, 2048, 1, 0.0),
    Shape(8, 2048, 8, 1.05),
    Shape(24, 512, 1, 0.8),
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
_TABLES_BYTES: Final = 128 << 20
"""Of a probe's rows: more than processors' caches hold."""
_LEAST_BYTES: Final = 64 << 10
_DEFAULT_SECONDS: Final = 60.0
_REDUCE_WIDTH: Final = 64
_REDUCE_STEPS: Final = 40
_BUSY_VALUES: Final = 1 << 18
"""Values that a busy thread goes over between two looks at whether it is to end."""


def measure_ranks(
    *,
    optimizer: OptimizerName = "rowwise_adagrad",
    seconds: float = _DEFAULT_SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> RankCosts:
    """Time probes over all ranks of ``torch.distributed``; collective.

    Args:
        optimizer: of the tables, none but "none".
        seconds: to spend in steps, about, beside making their tables, which takes half a minute, more with more
            ranks. With fewer than 60 there are half as many probes, of smaller tables.
        progress: told how many trials are done, and of how many.

    Raises:
        ValueError: a wrong argument. Others as of ``open_sharded``.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
    ranks, share = Ranks(), min(1.0, seconds / _DEFAULT_SECONDS)
    asked = list(_asked(ranks, max(_LEAST_BYTES, int(share * _TABLES_BYTES)), dims=1 + int(share)))
    trials = [list[float]() for _ in asked]
    reduces = list[tuple[float, float]]()
    for number in range(_ROUNDS):
        reduces.append(_reduce_us(ranks))
        for done, place in enumerate(np.random.default_rng(number).permutation(len(asked)), number * len(asked) + 1):
            subject, shardings = asked[place]
            trials[place].append(subject.step_s(shardings, optimizer, seconds / (_ROUNDS * len(asked))))
            if progress is not None:
                progress(done, _ROUNDS * len(asked))
    probes = [
        Probe(kind_of(shardings[0]), subject.amounts(shardings), statistics.median(taken))
        for (subject, shardings), taken in zip(asked, trials, strict=True)
    ]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    cores = len(set[int]().union(*ranks.gather(os.sched_getaffinity(0))[:local]))
    where = f"{ranks.size} ranks, {local} on each host of {cores} cores as {platform.node()}"
    reduce_us, reduce_busy_us = map(statistics.median, zip(*reduces, strict=True))
    return RankCosts.fitted(
        probes, world_size=ranks.size, local_world_size=local, cores=cores, optimizer=optimizer,
        source=f"tierstore plan measure-ranks, {where}", reduce_us=reduce_us, reduce_busy_us=reduce_busy_us,
    )  # fmt: skip


def _asked(ranks: Ranks, tables_bytes: int, *, dims: int) -> Iterator[tuple["_Subject", list[Sharding]]]:
    """Tables and where they are, of each probe; ``dims``: of each shape."""
    for (number, shape), beyond in itertools.product(enumerate(_SHAPES), range(dims)):
        dim = _DIMS[(number + beyond) % len(_DIMS)]
        subject = _Subject(ranks, shape, dim, max(1, tables_bytes // (shape.tables * 4 * dim)))
        for sharding_type, exchange in _FORMS:
            for owners in [ranks.size] if sharding_type in ("data_parallel", "column_wise") else [ranks.size, 1]:
                places = range(shape.tables)
                yield subject, [_sharding(sharding_type, exchange, table, owners, ranks.size) for table in places]


def _reduce_us(ranks: Ranks) -> tuple[float, float]:
    """What ``data_parallel`` adds to forward and backward of a small model, alone and beside a thread that is busy."""
    alone = nn.Sequential(nn.Linear(_REDUCE_WIDTH, _REDUCE_WIDTH), nn.ReLU(), nn.Linear(_REDUCE_WIDTH, _REDUCE_WIDTH))
    together, values = data_parallel(copy.deepcopy(alone)), torch.ones(_REDUCE_WIDTH, _REDUCE_WIDTH)

    def step_s(model: nn.Module) -> float:
        taken = []
        for _ in range(_REDUCE_STEPS):
            begun = time.perf_counter()
            model(values).sum().backward()
            taken.append(time.perf_counter() - begun)
        return max(ranks.gather(statistics.median(taken)))

    def beyond_us() -> float:
        return 1e6 * max(step_s(together) - step_s(alone), 0.0)

    idle, is_over, busy = beyond_us(), threading.Event(), torch.ones(_BUSY_VALUES)

    def work() -> None:
        while not is_over.is_set():
            busy.mul_(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return idle, beyond_us()
    finally:
        is_over.set()
        thread.join()


def _sharding(sharding_type: ShardingType, exchange: Exchange, table: int, owners: int, size: int) -> Sharding:
    """Over so many ranks, the first ones; whole tables in turns."""
    places = [table % owners] if sharding_type == "table_wise" else range(owners)
    return Sharding.checked(sharding_type, places, exchange, size)


class _Subject:
    """A probe's tables and batches."""

    def __init__(self, ranks: Ranks, shape: Shape, dim: int, num_rows: int) -> None:
        self._ranks = ranks
        self._shape = shape
        self._tables = [
            TableShape(name=f"t{number}", num_embeddings=num_rows, embedding_dim=dim) for number in range(shape.tables)
        ]
        size = shape.samples * shape.pooling_factor
        draws = itertools.product(range(ranks.size), range(_BATCHES), range(shape.tables))
        drawn = [
            draw_zipf(num_rows, shape.exponent, size, seed=seed, scatter_seed=table)
            for seed, (_, _, table) in enumerate(draws)
        ]
        self._ids: Int64s = np.stack(drawn).reshape(ranks.size, _BATCHES, shape.tables, size)

    def step_s(self, shardings: Sequence[Sharding], optimizer: OptimizerName, seconds: float) -> float:
        """Median of the steps that fit in so many seconds, each as long as in its slowest rank."""
        rows, dim, rule = self._tables[0].num_embeddings, self._tables[0].embedding_dim, OPTIMIZERS[optimizer](lr=_LR)
        row_bytes = 4 * (dim + rule.state_dim(dim)) + _BOOKS_BYTES
        ddr = 2 * len(self._tables) * rows * row_bytes + _STAGING_BYTES
        with open_sharded(cold="memory", ddr=ddr) as store:
            for table, sharding in zip(self._tables, shardings, strict=True):
                config = TableConfig(
                    name=table.name, num_embeddings=rows, embedding_dim=dim, optimizer=rule, pooling="sum"
                )
                store.create_table(config, **sharding._asdict())
            module, batches = ShardedTieredEmbeddingBagCollection(store), self._batches()
            gradient = torch.full((self._shape.samples, len(self._tables) * dim), 1e-3)
            other = torch.zeros(_OTHER_BYTES // 4)

            def timed(steps: int) -> list[float]:
                found = []
                for number in range(steps):
                    other.add_(1)
                    begun = time.perf_counter()
                    module(batches[number % _BATCHES]).values().backward(gradient)
                    found.append(time.perf_counter() - begun)
                return [max(step) for step in zip(*self._ranks.gather(found), strict=True)]

            warm = min(timed(_BATCHES))
            return statistics.median(timed(max(_BATCHES, min(_MOST_STEPS, int(seconds / warm)))))

    def _batches(self) -> list[KeyedJaggedTensor]:
        """Of this rank."""
        names = [table.name for table in self._tables]
        lengths = torch.full((len(names) * self._shape.samples,), self._shape.pooling_factor, dtype=torch.int64)
        own = torch.from_numpy(self._ids[self._ranks.rank])
        return [KeyedJaggedTensor(names, ids.ravel(), lengths=lengths) for ids in own]

    def amounts(self, shardings: Sequence[Sharding]) -> Amounts:
        """Of a step."""
        bags, ranks = self._shape.samples, self._ranks.size
        return Amounts.of_group(
            amounts_of(table, sharding, self._demand(number), bags=bags, ranks=ranks)
            for number, (table, sharding) in enumerate(zip(self._tables, shardings, strict=True))
        )

    def _demand(self, table: int) -> TableDemand:
        own = self._ids[:, :, table]
        rows = np.mean([len(np.unique(batch)) for batch in own.reshape(-1, own.shape[-1])])
        all_rows = np.mean([len(np.unique(own[:, number])) for number in range(_BATCHES)])
        return TableDemand(own.shape[-1], float(rows), float(all_rows))
