"""Timing tierstore's own pooled lookups, forward and fused backward, on the CPU: what costs are fitted to.

Shapes are timed in turns, some tables at once, so that each finds the processor's caches as the others left them; in a
training step it is not otherwise.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config import TableConfig
from ...nn import TieredEmbeddingBag
from ...rows import RowLayout
from ...settings.options import check_ranges, option
from ...store import Store, open_store
from ..traces import draw_zipf
from ..workload import OPTIMIZERS, OptimizerName, TableShape
from .measurement import Measurement
from .shapes import LookupShape

__all__ = ["QUICK", "Timing", "designed_shapes", "draw_bags", "measure_costs", "measure_lookups", "store_of"]

_GROUP: Final = 8
"""Tables that are timed in turns."""
_DIMS: Final = (4, 8, 16, 32, 64, 128, 256)
_ROOM_BYTES: Final = 64 << 20
_NANOSECOND: Final = 1e-9
_ONE_ID: Final = LookupShape(64, 4, 1.0, 1, 0.0, 16)
"""What takes hardly more than the call itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """How lookups are timed, and which shapes are.

    Attributes:
        optimizer: of the tables; "none": forward alone.
    """

    seconds: float = option(60.0, "after the first tables, beyond which no further ones are begun", low=0)
    count: int = option(160, "shapes", low=1)
    rounds: int = option(7, "times each; the median counts", low=1)
    batches: int = option(3, "different ones of each shape, in turns", low=1)
    threads: int = option(1, "of the store", low=1)
    seed: int = option(0, "of shapes and ids", low=0)
    max_rows: int = option(4_000_000, "of a table", low=1000, high=1 << 31)
    max_bytes: int = option(256 << 20, "of a table", low=1 << 20, high=1 << 40)
    max_lookups: int = option(100_000, "ids of a batch", low=100)
    max_batch: int = option(4096, "bags of a batch", low=64)
    optimizer: OptimizerName = "rowwise_adagrad"

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds: of one thread those that it computed, whatever else the machine did meanwhile."""
        return time.thread_time if self.threads == 1 else time.perf_counter


QUICK: Final = Timing(seconds=30.0, count=12, rounds=2, batches=1, max_rows=2000, max_lookups=500, max_batch=64)
"""To see that it works: its figures say nothing of larger tables."""


def designed_shapes(timing: Timing) -> tuple[LookupShape, ...]:
    """A Latin hypercube of shapes, even over the logarithms of rows, columns, bags and ids a bag, and over exponents.

    M. D. McKay et al., A Comparison of Three Methods for Selecting Values of Input Variables (Technometrics 21, 1979).
    """
    generator = np.random.default_rng(timing.seed)
    cells = np.stack([generator.permutation(timing.count) for _ in range(5)], axis=1)
    places = (cells + generator.random(cells.shape)) / timing.count
    return tuple(_shape(timing, *place) for place in places.tolist())


def _shape(timing: Timing, rows: float, dim: float, bags: float, pooling: float, exponent: float) -> LookupShape:
    """Each argument is from 0 to 1."""
    num_columns = _DIMS[int(dim * len(_DIMS))]
    most_rows = max(2, min(timing.max_rows, timing.max_bytes // (4 * num_columns + 8)))
    batch = round(2 ** (4 + bags * (np.log2(timing.max_batch) - 4)))
    most_ids = max(1.0, min(128.0, timing.max_lookups / batch))
    return LookupShape(
        num_embeddings=round(min(100, most_rows) * (most_rows / min(100, most_rows)) ** rows),
        embedding_dim=num_columns,
        pooling_factor=float(np.round(most_ids**pooling, 2)),
        batch_samples=batch,
        exponent=round(1.5 * exponent, 3),
        weight_bytes=4 * num_columns,
    )


def measure_costs(
    folder: str | os.PathLike[str] | None = None,
    *,
    timing: Timing = Timing(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Time a designed sample of shapes, in a minute or so; compiling kernels at first use comes on top.

    Args:
        folder: where stores are made, and removed; default: the system's folder for temporary files. Nothing of note
            is written.
        progress: called with the shapes that are done, and their number.

    Returns:
        one for each shape for which there was time.
    """
    return measure_lookups(designed_shapes(timing), folder, timing=timing, progress=progress)


def measure_lookups(
    shapes: Sequence[LookupShape],
    folder: str | os.PathLike[str] | None = None,
    *,
    timing: Timing = Timing(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Time these shapes, as ``measure_costs`` does; in order, and all of them or as many as there is time for."""
    deadline = None
    generator = np.random.default_rng(timing.seed)
    found: list[Measurement] = []
    for first in range(0, len(shapes), _GROUP):
        if deadline is not None and time.perf_counter() > deadline:
            break
        with tempfile.TemporaryDirectory(prefix="tierstore-timing-", dir=folder) as directory:
            found += _measure_group(shapes[first : first + _GROUP], directory, timing, generator)
        # The first tables compile kernels, which may take half a minute.
        deadline = deadline or time.perf_counter() + timing.seconds
        if progress is not None:
            progress(len(found), len(shapes))
    return tuple(found)


class _Seconds(NamedTuple):
    forward: float
    backward: float


class _Bags(NamedTuple):
    """One batch of one table."""

    ids: Tensor
    offsets: Tensor


def draw_bags(generator: np.random.Generator, shape: LookupShape) -> _Bags:
    """ids int64 [n] and offsets int64 [bags + 1]: a bag has the pooling factor's whole part of ids, or one more."""
    least = int(shape.pooling_factor)
    lengths = least + (generator.random(shape.batch_samples) < shape.pooling_factor - least)
    offsets = np.append(0, np.cumsum(lengths))
    seed = int(generator.integers(1 << 63))
    ids = draw_zipf(shape.num_embeddings, shape.exponent, int(offsets[-1]), seed=seed)
    return _Bags(torch.from_numpy(ids), torch.from_numpy(offsets))


def _measure_group(
    shapes: Sequence[LookupShape], directory: str, timing: Timing, generator: np.random.Generator
) -> list[Measurement]:
    timed = [*shapes, _ONE_ID]
    tables = [
        TableShape(name=f"t{index}", num_embeddings=shape.num_embeddings, embedding_dim=shape.embedding_dim)
        for index, shape in enumerate(timed)
    ]
    batches = [[draw_bags(generator, shape) for _ in range(timing.batches)] for shape in timed]
    with store_of(tables, directory, timing) as store:
        bags = [TieredEmbeddingBag(store[table.name], include_last_offset=True) for table in tables]
        for bag, own in zip(bags, batches, strict=True):
            for batch in own:
                _step(bag, batch, timing)
        rounds = [
            [_step(bag, own[number % timing.batches], timing) for bag, own in zip(bags, batches, strict=True)]
            for number in range(timing.rounds)
        ]
    *medians, one_id = np.median(np.array(rounds), axis=0).tolist()
    return [
        Measurement(shape, forward, backward, sum(one_id))
        for shape, (forward, backward) in zip(shapes, medians, strict=True)
    ]


def store_of(tables: Sequence[TableShape], directory: str, timing: Timing) -> Store:
    """A new store of float32 tables, each row in memory from its first use."""
    kind = OPTIMIZERS.get(timing.optimizer, OPTIMIZERS["sgd"])
    optimizer = kind(lr=0.01)
    layouts = [RowLayout(dim=each.embedding_dim, state_dim=optimizer.state_dim(each.embedding_dim)) for each in tables]
    rows_bytes = sum(each.num_embeddings * layout.row_bytes for each, layout in zip(tables, layouts, strict=True))
    rows = sum(each.num_embeddings for each in tables)
    store = open_store(directory, ddr=int(1.25 * rows_bytes) + 24 * rows + _ROOM_BYTES, threads=timing.threads)
    for each in tables:
        config: dict[str, Any] = {"name": each.name, "optimizer": optimizer, "pooling": "sum"}
        store.create_table(TableConfig(num_embeddings=each.num_embeddings, embedding_dim=each.embedding_dim, **config))
    return store


def _step(bag: TieredEmbeddingBag, batch: _Bags, timing: Timing) -> _Seconds:
    clock = timing.clock
    with torch.set_grad_enabled(timing.optimizer != "none"):
        start = clock()
        pooled = bag(batch.ids, batch.offsets)
        middle = clock()
    if timing.optimizer == "none":
        return _Seconds(max(middle - start, _NANOSECOND), 0.0)
    gradient = torch.ones_like(pooled)
    begin = clock()
    pooled.backward(gradient)
    return _Seconds(max(middle - start, _NANOSECOND), max(clock() - begin, _NANOSECOND))
