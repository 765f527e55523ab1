"""Loops over small stores, each of which adds one kind of work: what ``fit`` makes costs of.

All on one core, in its own processor time: what other processes take meanwhile, or a device is waited for, is not in
it. The loops of a table:

- its rows all in memory: lookups (*lookup*), then training steps on the same batches (*training*), whose ids are
  many times the same few or nearly all different, in bags of one or several;
- some of these batches where the cache holds what they use but not every row (*hits*);
- batches of rows that are not in the cache, their blocks in the system's page cache (*misses*), then not (*cold*);
- such batches trained on, before and while rows that they put out have to be written (*write-back*).
"""

import functools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import optim
from ...config import TableConfig
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...opening import open_store
from ...rows import RowLayout
from ...store import Store
from .fit import Loop
from .memory import torch_threads
from .page_cache import drop, warm

__all__ = ["DIMS", "Amounts", "LoopSizes", "measure_loops"]

DIMS: Final = (16, 64, 128)
_TINY_DIM: Final = 64
"""Of the batches of one id."""
_COLD_DIMS: Final = (64, 128)
_WIDE_DIM: Final = 1024
"""Its rows lie in blocks of four pages, so that a block's cost can be told from a byte's."""
_WIDE_SHARE: Final = 1 / 16
"""Rows of that table, of those of others."""
_EXPONENTS: Final = (1.05, 0.0)
"""Of Zipf's law: as lookups mostly are, and as hard on caches as can be."""
_BATCHES: Final = 4
_MISS_BATCHES: Final = 8
_COLD_BATCHES: Final = 4
_DIRTY_BATCHES: Final = 6
_HIT_SHARE: Final = 0.45
_MISS_SHARE: Final = 1 / 8
"""Of the rows, those that the cache holds where batches hit, and where they miss."""
_BOOKS_BYTES: Final = 60
"""A cached row takes about so much beside itself."""
_SLACK: Final = 1.2
"""Of the budget an eighth is for transactions."""
_STAGING_BYTES: Final = 512 << 10
_ROWS_FILE: Final = "rows.lmdb"
_CHUNK: Final = 100_000

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LoopSizes:
    """How much is done.

    Attributes:
        rows: of a table; together far more than the processor's caches hold.
        samples: of a batch whose rows are in memory.
        pooling_factor: ids of its bags; in other loops over the same ids there is one in each.
        miss_rows: of a batch whose rows are not.
        passes: over the batches whose rows are in memory.
        cold_blocks: read from the device in one go; on a slow one fewer than ``miss_rows``.
    """

    rows: int = 400_000
    samples: int = 4096
    pooling_factor: int = 8
    miss_rows: int = 4096
    passes: int = 10
    cold_blocks: int = 4096

    @property
    def ids(self) -> int:
        return self.samples * self.pooling_factor


class _Dirty(NamedTuple):
    """A step that had blocks written."""

    ns: int
    written: float


class _Subject(NamedTuple):
    """A store that is open, and the module over its one table."""

    store: Store
    module: TieredEmbeddingBagCollection
    layout: RowLayout

    def forward(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.module(batch)

    def train(self, batch: KeyedJaggedTensor, gradient: Tensor) -> None:
        self.module(batch).values().backward(gradient)

    def trainer(self, batch: KeyedJaggedTensor) -> Callable[[KeyedJaggedTensor], None]:
        """``train`` for batches of this one's shape; making the gradient is the model's work."""
        return functools.partial(self.train, gradient=torch.full((batch.stride(), self.layout.dim), 1e-3))

    @property
    def name(self) -> str:
        return f"rows of {self.layout.row_bytes} bytes"


class Amounts(NamedTuple):
    """Of a batch: ids, distinct rows, bags; and the work that they are, as ``Loop.work`` has it."""

    ids: float
    rows: float
    bags: float

    @classmethod
    def of(cls, batches: Sequence[KeyedJaggedTensor]) -> "Amounts":
        """Means."""
        rows = statistics.mean(len(np.unique(batch.values().numpy())) for batch in batches)
        return cls(len(batches[0].values()), rows, batches[0].stride())

    def work(self, what: str, layout: RowLayout) -> dict[str, float]:
        """Of pooling ("pool") or training ("update")."""
        counts = {what: self.ids, f"{what}_row": self.rows, f"{what}_bag": self.bags}
        nanoseconds = {f"{name}_ns": count for name, count in counts.items()}
        return nanoseconds | {f"{name}_ns_per_byte": count * layout.row_bytes for name, count in counts.items()}

    def lookup(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in memory."""
        return {"batch_us": 1000, **self.work("pool", layout)}

    def training(self, layout: RowLayout) -> dict[str, float]:
        """Of a training step, beyond its lookup."""
        return {"step_us": 1000, **self.work("update", layout)}

    def hits(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in the cache."""
        return {"admit_ns": self.ids, "admit_row_ns": self.rows, **self.lookup(layout)}

    def misses(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup none of whose rows is in the cache."""
        return {"miss_ns": self.rows, "miss_ns_per_byte": self.rows * layout.row_bytes, **self.hits(layout)}


def measure_loops(
    folder: Path, *, sizes: LoopSizes | None = None, progress: Callable[[float], None] | None = None
) -> list[Loop]:
    """Time all loops, on stores that are made in ``folder`` and removed.

    Args:
        progress: told which share is done, from 0 to 1.
    """
    sizes = sizes or LoopSizes()
    loops: list[Loop] = []
    dims = (*DIMS, _WIDE_DIM)
    with torch_threads(1):
        for number, dim in enumerate(dims):
            path = folder / f"rows-of-{dim}"
            try:
                loops += _of_table(path, dim, sizes)
            finally:
                shutil.rmtree(path, ignore_errors=True)
            if progress is not None:
                progress((number + 1) / len(dims))
    return loops


def _of_table(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    if dim == _WIDE_DIM:
        rows = max(64, int(sizes.rows * _WIDE_SHARE))
        _fill(path, dim, rows)
        yield from _write_back(path, dim, rows, max(8, sizes.miss_rows // 8))
        return
    _fill(path, dim, sizes.rows)
    yield from _in_memory(path, dim, sizes)
    yield from _hits(path, dim, sizes)
    yield from _misses(path, dim, sizes)
    yield from _write_back(path, dim, sizes.rows, sizes.miss_rows)


def _fill(path: Path, dim: int, rows: int) -> None:
    """A store in which every row was written."""
    with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
        rule = optim.RowWiseAdagrad(lr=0.01)
        table = store.create_table(
            TableConfig(
                name="t", num_embeddings=rows, embedding_dim=dim, feature_names=("f",), pooling="sum", optimizer=rule
            )
        )
        for first in range(0, rows, _CHUNK):
            ids = torch.arange(first, min(first + _CHUNK, rows))
            table.write(ids, torch.full((len(ids), dim), 0.01))
        store.commit()


@contextmanager
def _opened(path: Path, dim: int, cached_rows: int) -> Iterator[_Subject]:
    """With a cache of about so many rows."""
    layout = RowLayout(dim=dim, state_dim=1)
    ddr = _STAGING_BYTES + int(cached_rows * (layout.row_bytes + _BOOKS_BYTES) * _SLACK)
    with open_store(path, mode="w", ddr=ddr, threads=1) as store:
        yield _Subject(store, TieredEmbeddingBagCollection(store), store["t"].layout)


def _batch(ids: Int64s, pooling_factor: int) -> KeyedJaggedTensor:
    offsets = torch.arange(0, len(ids) + 1, pooling_factor)
    return KeyedJaggedTensor(["f"], torch.from_numpy(ids), offsets=offsets)


def _batches(sizes: LoopSizes, exponent: float, pooling_factor: int) -> list[KeyedJaggedTensor]:
    """Ids by Zipf's law; popular rows lie anywhere. For one exponent the ids are the same however they are pooled."""
    generator = np.random.default_rng(0)
    cumulated = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -exponent)
    places = generator.permutation(sizes.rows)
    drawn = np.searchsorted(cumulated, generator.random((_BATCHES, sizes.ids)) * cumulated[-1])
    return [_batch(places[np.minimum(ranks, sizes.rows - 1)], pooling_factor) for ranks in drawn]


def _walk(rows: int, count: int, pooling_factor: int) -> Iterator[KeyedJaggedTensor]:
    """Batches of ``count`` rows, none of which comes again before all others came."""
    order = np.random.default_rng(1).permutation(rows)
    first = 0
    while True:
        yield _batch(np.take(order, np.arange(first, first + count), mode="wrap"), pooling_factor)
        first += count


def _ns(work: Callable[[KeyedJaggedTensor], None], batch: KeyedJaggedTensor) -> float:
    """Of this thread, on a processor."""
    began = time.thread_time()
    work(batch)
    return 1e9 * (time.thread_time() - began)


def _median_ns(work: Callable[[KeyedJaggedTensor], None], batches: Sequence[KeyedJaggedTensor], passes: int) -> float:
    """Of a batch, after one pass that does not count."""
    for batch in batches:
        work(batch)
    return statistics.median(_ns(work, batch) for _ in range(passes) for batch in batches)


def _in_memory(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with _opened(path, dim, 2 * sizes.rows) as subject:
        table = subject.store["t"]
        for first in range(0, sizes.rows, _CHUNK):
            table.read(torch.arange(first, min(first + _CHUNK, sizes.rows)))
        for exponent in _EXPONENTS:
            for pooling_factor in (1, sizes.pooling_factor):
                name = f"{subject.name}, {pooling_factor} a bag, {'popular' if exponent else 'any'} rows"
                yield from _lookup_and_training(subject, name, _batches(sizes, exponent, pooling_factor), sizes.passes)
        if dim == _TINY_DIM:
            one_id = [_batch(np.array([row]), 1) for row in range(_BATCHES)]
            yield from _lookup_and_training(subject, "one id", one_id, sizes.passes)


def _lookup_and_training(subject: _Subject, name: str, batches: list[KeyedJaggedTensor], passes: int) -> Iterator[Loop]:
    amounts, layout = Amounts.of(batches), subject.layout
    lookup_ns = _median_ns(subject.forward, batches, passes)
    step_ns = _median_ns(subject.trainer(batches[0]), batches, passes)
    yield Loop(f"lookup, {name}", "lookup", lookup_ns, amounts.lookup(layout))
    beyond_ns = max(step_ns - lookup_ns, 1.0)
    yield Loop(f"training beyond lookup, {name}", "training", beyond_ns, amounts.training(layout))


def _hits(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with _opened(path, dim, int(sizes.rows * _HIT_SHARE)) as subject:
        assert subject.store.stats().ddr.capacity_rows < sizes.rows, "else no row is looked for"
        for exponent in _EXPONENTS:
            batches = _batches(sizes, exponent, sizes.pooling_factor)
            for batch in batches:
                subject.forward(batch)
            before = subject.store.stats().ddr.misses
            ns = _median_ns(subject.forward, batches, sizes.passes)
            assert subject.store.stats().ddr.misses == before, "the cache holds every row that the batches use"
            name = f"lookup in a cache, {subject.name}, {'popular' if exponent else 'any'} rows"
            yield Loop(name, "hits", ns, Amounts.of(batches).hits(subject.layout))


def _misses(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    warm(path / _ROWS_FILE)
    with _opened(path, dim, int(sizes.rows * _MISS_SHARE)) as subject:
        walk = _walk(sizes.rows, sizes.miss_rows, sizes.pooling_factor)
        while subject.store.stats().ddr.evictions == 0:
            subject.forward(next(walk))
        batches = [next(walk) for _ in range(_MISS_BATCHES)]
        before = subject.store.stats().ddr.misses
        ns = statistics.median(_ns(subject.forward, batch) for batch in batches)
        missed = subject.store.stats().ddr.misses - before
        assert missed == sizes.miss_rows * len(batches), "no row comes again before it was evicted"
        yield Loop(f"missed lookup, {subject.name}", "misses", ns, Amounts.of(batches).misses(subject.layout))
    if dim in _COLD_DIMS:
        yield from _cold(path, dim, sizes)


def _cold(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    """As misses, in batches that a slow device reads in time; by turns from the page cache and from the device."""
    rows = min(sizes.miss_rows, sizes.cold_blocks) // sizes.pooling_factor * sizes.pooling_factor
    differences, blocks = [], []
    with _opened(path, dim, int(sizes.rows * _MISS_SHARE)) as subject:
        walk = _walk(sizes.rows, max(rows, sizes.pooling_factor), sizes.pooling_factor)
        page_bytes = subject.layout.page_bytes
        for _ in range(_COLD_BATCHES):
            warm(path / _ROWS_FILE)
            warm_ns = _ns(subject.forward, next(walk))
            drop(path / _ROWS_FILE)
            before = subject.store.stats().ssd.bytes_read
            cold_ns = _ns(subject.forward, next(walk))
            blocks.append((subject.store.stats().ssd.bytes_read - before) / page_bytes)
            differences.append(cold_ns - warm_ns)
    name = f"reads beyond misses, {subject.name}"
    yield Loop(name, "cold", max(statistics.median(differences), 1.0), {"read_ns": statistics.median(blocks)})


def _write_back(path: Path, dim: int, rows: int, miss_rows: int) -> Iterator[Loop]:
    """Steps over rows that are not in the cache, first while it has room, then while each puts out newer rows."""
    warm(path / _ROWS_FILE)
    free: list[int] = []
    full: list[_Dirty] = []
    with _opened(path, dim, int(rows * _MISS_SHARE)) as subject:
        walk = _walk(rows, miss_rows, 1)
        train = subject.trainer(next(walk))
        for batch in walk:
            before = subject.store.stats().ssd.bytes_written
            ns = round(_ns(train, batch))
            written = (subject.store.stats().ssd.bytes_written - before) / subject.layout.block_bytes
            if written:
                full.append(_Dirty(ns, written))
            else:
                free.append(ns)
            if len(full) > _DIRTY_BATCHES:
                break
        block_bytes = subject.layout.block_bytes
    # The first step of each kind warms up, or is partly of the other.
    blocks = statistics.mean(each.written for each in full[1:])
    beyond_ns = statistics.median(each.ns for each in full[1:]) - statistics.median(free[1:] or free)
    work = {"write_ns": blocks, "write_ns_per_byte": blocks * block_bytes}
    yield Loop(f"write-back, {subject.name}", "write-back", max(beyond_ns, 1.0), work)
