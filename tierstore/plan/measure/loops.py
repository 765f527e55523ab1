"""Loops over small stores, each of which adds one kind of work: what ``fit`` makes costs of.

All on one core, in its own processor time: what other processes take meanwhile, or a device is waited for, is not in
it. The loops of a table:

- its rows all in memory: lookups (*lookup*), then training steps on the same batches (*training*), whose ids are
  many times the same few or nearly all different, in bags of one or several;
- some of these batches where the cache holds what they use but not every row (*hits*);
- batches of rows that are not in the cache, their pages in the system's page cache (*misses*), then not (*cold*);

Those of ``write_loops`` are training steps that have rows written; those of ``batch_loops`` have hardly any ids.
"""

import functools
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ...nn import KeyedJaggedTensor
from .fit import Amounts, Loop
from .memory import torch_threads
from .page_cache import drop, warm
from .subject import CHUNK, ROWS_FILE, Subject, drawn, fill, jagged, median_ns, opened, thread_ns
from .training_loops import of_batches, of_writes

__all__ = ["DIMS", "Amounts", "LoopSizes", "measure_loops"]

DIMS: Final = (16, 64, 128)
_TINY_DIM: Final = 64
"""Of the batches of one id."""
_COLD_DIMS: Final = (64, 128)
_WRITE_DIMS: Final = (16, 64)
_WIDE_DIM: Final = 1024
"""So that a row's cost can be told from a byte's."""
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


@dataclass(frozen=True, kw_only=True)
class LoopSizes:
    """How much is done.

    Attributes:
        rows: of a table; together far more than the processor's caches hold.
        samples: of a batch whose rows are in memory.
        pooling_factor: ids of its bags; in other loops over the same ids there is one in each.
        miss_rows: of a batch whose rows are not.
        passes: over the batches whose rows are in memory.
        cold_rows: read from the device in one go; on a slow one fewer than ``miss_rows``.
    """

    rows: int = 400_000
    samples: int = 4096
    pooling_factor: int = 8
    miss_rows: int = 4096
    passes: int = 10
    cold_rows: int = 4096

    @property
    def ids(self) -> int:
        return self.samples * self.pooling_factor


def measure_loops(
    folder: Path, *, sizes: LoopSizes | None = None, progress: Callable[[float], None] | None = None
) -> list[Loop]:
    """Time all loops, on stores that are made in ``folder`` and removed.

    Args:
        progress: told which share is done, from 0 to 1.
    """
    sizes = sizes or LoopSizes()
    loops: list[Loop] = []
    makers: list[tuple[str, Callable[[Path], Iterable[Loop]]]] = [
        (f"rows-of-{dim}", functools.partial(_of_table, dim=dim, sizes=sizes)) for dim in (*DIMS, _WIDE_DIM)
    ]
    makers.append(("tables", functools.partial(of_batches, rows=sizes.rows, passes=sizes.passes)))
    with torch_threads(1):
        for number, (name, make) in enumerate(makers):
            try:
                loops += make(folder / name)
            finally:
                shutil.rmtree(folder / name, ignore_errors=True)
            if progress is not None:
                progress((number + 1) / len(makers))
    return loops


def _of_table(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    if dim == _WIDE_DIM:
        rows = max(64, int(sizes.rows * _WIDE_SHARE))
        fill(path, dim, rows)
        yield from of_writes(path, dim, rows, max(8, sizes.miss_rows // 8))
        return
    fill(path, dim, sizes.rows)
    yield from _in_memory(path, dim, sizes)
    yield from _hits(path, dim, sizes)
    yield from _misses(path, dim, sizes)
    if dim in _WRITE_DIMS:
        yield from of_writes(path, dim, sizes.rows, sizes.miss_rows)


def _batches(sizes: LoopSizes, exponent: float, pooling_factor: int) -> list[KeyedJaggedTensor]:
    """Ids by Zipf's law; popular rows lie anywhere. For one exponent the ids are the same however they are pooled."""
    generator = np.random.default_rng(0)
    cumulated = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -exponent)
    places = generator.permutation(sizes.rows)
    drawn = np.searchsorted(cumulated, generator.random((_BATCHES, sizes.ids)) * cumulated[-1])
    return [jagged(places[np.minimum(ranks, sizes.rows - 1)], pooling_factor) for ranks in drawn]


def _in_memory(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with opened(path, dim, 2 * sizes.rows) as subject:
        table = subject.store["t0"]
        for first in range(0, sizes.rows, CHUNK):
            table.read(torch.arange(first, min(first + CHUNK, sizes.rows)))
        for exponent in _EXPONENTS:
            for pooling_factor in (1, sizes.pooling_factor):
                name = f"{subject.name}, {pooling_factor} a bag, {'popular' if exponent else 'any'} rows"
                yield from _lookup_and_training(subject, name, _batches(sizes, exponent, pooling_factor), sizes.passes)
        if dim == _TINY_DIM:
            one_id = [jagged(np.array([row]), 1) for row in range(_BATCHES)]
            yield from _lookup_and_training(subject, "one id", one_id, sizes.passes)


def _lookup_and_training(subject: Subject, name: str, batches: list[KeyedJaggedTensor], passes: int) -> Iterator[Loop]:
    amounts, layout = Amounts.of(batches), subject.layout
    lookup_ns = median_ns(subject.forward, batches, passes)
    step_ns = median_ns(subject.trainer(batches[0]), batches, passes)
    yield Loop(f"lookup, {name}", "lookup", lookup_ns, amounts.lookup(layout))
    beyond_ns = max(step_ns - lookup_ns, 1.0)
    yield Loop(f"training beyond lookup, {name}", "training", beyond_ns, amounts.training(layout))


def _hits(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with opened(path, dim, int(sizes.rows * _HIT_SHARE)) as subject:
        assert subject.store.stats().ddr.capacity_rows < sizes.rows, "else no row is looked for"
        for exponent in _EXPONENTS:
            batches = _batches(sizes, exponent, sizes.pooling_factor)
            for batch in batches:
                subject.forward(batch)
            before = subject.store.stats().ddr.misses
            ns = median_ns(subject.forward, batches, sizes.passes)
            assert subject.store.stats().ddr.misses == before, "the cache holds every row that the batches use"
            name = f"lookup in a cache, {subject.name}, {'popular' if exponent else 'any'} rows"
            yield Loop(name, "hits", ns, Amounts.of(batches).hits(subject.layout))


def _misses(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    warm(path / ROWS_FILE)
    with opened(path, dim, int(sizes.rows * _MISS_SHARE)) as subject:
        draw, count = drawn(sizes.rows), sizes.miss_rows
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.forward(draw(count, sizes.pooling_factor))
        batches = [draw(count, sizes.pooling_factor) for _ in range(_MISS_BATCHES)]
        before = subject.store.stats().ddr.misses
        ns = statistics.median(thread_ns(subject.forward, batch) for batch in batches)
        missing = Amounts(0, (subject.store.stats().ddr.misses - before) / len(batches), 0)
        work = Amounts.of(batches).hits(subject.layout) | missing.bringing(subject.layout)
        yield Loop(f"missed lookup, {subject.name}", "misses", ns, work)
    if dim in _COLD_DIMS:
        yield from _cold(path, dim, sizes)


def _cold(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    """As misses, in batches that a slow device reads in time; by turns from the page cache and from the device."""
    rows = min(sizes.miss_rows, sizes.cold_rows) // sizes.pooling_factor * sizes.pooling_factor
    differences, pages = [], []
    with opened(path, dim, int(sizes.rows * _MISS_SHARE)) as subject:
        draw, count = drawn(sizes.rows), max(rows, sizes.pooling_factor)
        page_bytes = subject.layout.page_bytes
        for _ in range(_COLD_BATCHES):
            warm(path / ROWS_FILE)
            warm_ns = thread_ns(subject.forward, draw(count, sizes.pooling_factor))
            drop(path / ROWS_FILE)
            before = subject.store.stats().ssd.bytes_read
            cold_ns = thread_ns(subject.forward, draw(count, sizes.pooling_factor))
            pages.append((subject.store.stats().ssd.bytes_read - before) / page_bytes)
            differences.append(cold_ns - warm_ns)
    name = f"reads beyond misses, {subject.name}"
    yield Loop(name, "cold", max(statistics.median(differences), 1.0), {"read_ns": statistics.median(pages)})
