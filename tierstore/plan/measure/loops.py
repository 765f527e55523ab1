"""Loops over small stores, each of which adds one kind of work: what ``fit`` makes costs of.

All on one core, in its own processor time: what other processes take meanwhile, or a device is waited for, is not in
it. The loops of a table:

- its rows all in memory: lookups (*lookup*), then training steps on the same batches (*training*), whose ids are
  many times the same few or nearly all different, in bags of one or several;
- some of these batches where the cache holds what they use but not every row (*hits*);
- batches of rows that are not in the cache, their pages in the system's page cache (*misses*), then not (*cold*);
- training steps that miss their rows, and put as many newer ones out. What writes them may be another thread, so the
  whole process's time counts, with what it takes to have the device keep what was written: at first, when no room is to
  be won back, with a cache whose budget allows of large transactions and with one of small ones, so that a
  transaction's cost can be told from its rows' (*write-back*); and when every row was rewritten so often that cleaning
  moves as many as it ever does (*cleaning*).

Over many tables, and over threads:

- steps with batches that are brought in ahead, some of whose rows have to come from disk and put out newer ones: what
  that takes beyond those rows, on the thread that computes (*hand-over*) and on all others (*ahead*). Threads that take
  turns find the processor's caches full of each other's data, which is in it;
- training steps with rows in memory on one core and on all, by the clock: what sharing them adds to an equal part
  (*threads*).
"""

import contextlib
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import optim
from ...config import TableConfig
from ...io.btree import META_READ_BYTES, parse_meta
from ...kernels.arrays import Int64s
from ...kernels.threads import MIN_WORK, default_threads
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...nn.prefetch import prefetch
from ...rows import RowLayout
from ...store import Store, open_store
from ..host import per_byte, pooling_work, updating_work
from .fit import Loop
from .machine import torch_threads
from .page_cache import drop, warm

_BOOKS_BYTES: Final = 60
"""A cached row takes about so much beside itself."""
_SLACK: Final = 1.2
"""Of the budget an eighth is for transactions."""
_STAGING_BYTES: Final = 512 << 10
_ROWS_FILE: Final = "rows.lmdb"
_CHUNK: Final = 100_000

_DIMS: Final = (16, 64, 128)
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
_HIT_SHARE: Final = 0.45
_MISS_SHARE: Final = 1 / 8
"""Of the rows, those that the cache holds where batches hit, and where they miss."""

_WRITE_LOOPS: Final = (("write-back", 8, 0.25), ("write-back", 64, 0.25), ("cleaning", 8, 3.0))
"""Stage, which part of the rows the cache holds, and how often as many as all rows are written before."""
_LEAST_CACHED: Final = 128
_TIMED_SHARE: Final = 1 / 2
"""Of the rows; with those before not so many that what was superseded exceeds the slack."""

_TABLES: Final = 32
_TABLES_DIM: Final = 64
_AHEAD_IDS: Final = 64
"""For each table, of batches that are brought in ahead."""
_AHEAD_STEPS: Final = 60
_AHEAD_WARM_STEPS: Final = 120
_AHEAD_CACHED_SHARE: Final = 0.2
_AHEAD_USED_SHARE: Final = 0.25
"""Of the rows, those that the cache holds, and those that are looked up."""
_AHEAD_DEPTH: Final = 2


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


def measure_loops(
    folder: Path, *, sizes: LoopSizes | None = None, progress: Callable[[float], None] | None = None
) -> list[Loop]:
    """Time all loops, on stores that are made in ``folder`` and removed.

    Args:
        progress: told which share is done, from 0 to 1.
    """
    sizes = sizes or LoopSizes()
    loops: list[Loop] = []
    makers: list[Callable[[Path], Iterable[Loop]]] = [
        *(functools.partial(_of_table, dim=dim, sizes=sizes) for dim in _DIMS),
        functools.partial(_of_wide_table, sizes=sizes),
        functools.partial(_of_tables, sizes=sizes),
    ]
    with torch_threads(1):
        for number, make in enumerate(makers, 1):
            try:
                loops += make(folder / "store")
            finally:
                shutil.rmtree(folder / "store", ignore_errors=True)
            if progress is not None:
                progress(number / len(makers))
    return loops


# A store, and what is counted of it


class _Subject(NamedTuple):
    """A store that is open, and the module over its tables."""

    store: Store
    module: TieredEmbeddingBagCollection
    layout: RowLayout

    def forward(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.module(batch)

    def _train(self, batch: KeyedJaggedTensor, gradient: Tensor) -> None:
        self.module(batch).values().backward(gradient)

    def trainer(self, batch: KeyedJaggedTensor) -> Callable[[KeyedJaggedTensor], None]:
        """A step with batches of this one's shape; making the gradient is the model's work."""
        columns = len(self.store.tables) * self.layout.dim
        return functools.partial(self._train, gradient=torch.full((batch.stride(), columns), 1e-3))

    @property
    def name(self) -> str:
        return f"rows of {self.layout.row_bytes} bytes"


def _fill(path: Path, dim: int, rows: int, *, tables: int = 1) -> None:
    """A store in which every row was written; ``rows`` of each table."""
    with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
        for number in range(tables):
            table = store.create_table(
                TableConfig(
                    name=f"t{number}",
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=(f"f{number}",),
                    pooling="sum",
                    optimizer=optim.RowWiseAdagrad(lr=0.01),
                )
            )
            for first in range(0, rows, _CHUNK):
                ids = torch.arange(first, min(first + _CHUNK, rows))
                table.write(ids, torch.full((len(ids), dim), 0.01))
        store.commit()


@contextlib.contextmanager
def _opened(path: Path, dim: int, cached_rows: float, *, threads: int = 1) -> Iterator[_Subject]:
    """With a cache of about so many rows."""
    layout = RowLayout(dim=dim, state_dim=1)
    ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _BOOKS_BYTES) * _SLACK)
    with open_store(path, mode="w", ddr=ddr, threads=threads) as store:
        yield _Subject(store, TieredEmbeddingBagCollection(store), store["t0"].layout)
        store.rollback(store.version)


def transactions_in(path: Path) -> int:
    """That were ever made in a store's file, by the newer of its two meta pages."""
    with (path / _ROWS_FILE).open("rb", buffering=0) as file:
        first = parse_meta(os.pread(file.fileno(), META_READ_BYTES, 0))
        assert not isinstance(first, str), first
        second = parse_meta(os.pread(file.fileno(), META_READ_BYTES, first.page_bytes))
        assert not isinstance(second, str), second
    return max(first.txn_id, second.txn_id)


class _Counts(NamedTuple):
    """What a store has done: distinct rows of batches, those that were missing, those read, pages read for them; rows
    written and moved, and transactions."""

    unique: float
    misses: float
    read: float
    pages: float
    written: float
    moved: float
    transactions: float

    @classmethod
    def by(cls, subject: _Subject) -> "_Counts":
        """Since it was opened; of transactions, since its file was made."""
        ddr, ssd = subject.store.stats().ddr, subject.store.stats().ssd
        pages, transactions = ssd.bytes_read / subject.layout.page_bytes, transactions_in(subject.store.directory)
        return cls(ddr.unique, ddr.misses, ssd.lookups, pages, ssd.rows_written, ssd.rows_moved, transactions)

    def since(self, before: "_Counts", steps: int = 1) -> "_Counts":
        """In each of so many steps."""
        return _Counts(*((now - then) / steps for now, then in zip(self, before, strict=True)))

    def writing(self, layout: RowLayout) -> dict[str, float]:
        """As ``Loop.work`` has it."""
        rows = per_byte("append", self.written, layout.row_bytes) | per_byte("move", self.moved, layout.row_bytes)
        return rows | {"transaction_us": 1000 * self.transactions}


class Amounts(NamedTuple):
    """Of a batch: ids, distinct rows, bags; and the work that they are, as ``Loop.work`` has it."""

    ids: float
    rows: float
    bags: float
    layout: RowLayout

    @classmethod
    def of(cls, batches: Sequence[KeyedJaggedTensor], layout: RowLayout) -> "Amounts":
        """Means."""
        rows = statistics.mean(len(np.unique(batch.values().numpy())) for batch in batches)
        return cls(len(batches[0].values()), rows, batches[0].stride(), layout)

    def lookup(self) -> dict[str, float]:
        """Of a lookup whose rows are all in memory."""
        return {"batch_us": 1000, **pooling_work(**self._asdict())}

    def training(self) -> dict[str, float]:
        """Of a training step, beyond its lookup."""
        return {"step_us": 1000, **updating_work(**self._asdict())}

    def admitting(self) -> dict[str, float]:
        """Of finding them in a cache in which not all rows fit."""
        return {"admit_ns": self.ids, "admit_row_ns": self.rows}


def _jagged(ids: Int64s, pooling_factor: int, *, tables: int = 1) -> KeyedJaggedTensor:
    """Bags of so many ids, an equal part of them for each table, whose ids lie together."""
    offsets = torch.arange(0, len(ids) + 1, pooling_factor)
    return KeyedJaggedTensor([f"f{number}" for number in range(tables)], torch.from_numpy(ids), offsets=offsets)


_Work = Callable[[KeyedJaggedTensor], None]
_Clock = Callable[[], float]


def _ns(work: _Work, batch: KeyedJaggedTensor, clock: _Clock = time.thread_time) -> float:
    """Of this thread on a processor, by default."""
    began = clock()
    work(batch)
    return 1e9 * (clock() - began)


def _median_ns(
    work: _Work, batches: Sequence[KeyedJaggedTensor], passes: int, clock: _Clock = time.thread_time
) -> float:
    """Of a batch, after one pass that does not count."""
    for batch in batches:
        work(batch)
    return statistics.median(_ns(work, batch, clock) for _ in range(passes) for batch in batches)


# One table


def _of_table(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    _fill(path, dim, sizes.rows)
    yield from _in_memory(path, dim, sizes)
    yield from _hits(path, dim, sizes)
    yield from _misses(path, dim, sizes)
    if dim in _COLD_DIMS:
        yield _cold(path, dim, sizes)
    if dim in _WRITE_DIMS:
        yield from _threads(path, dim, sizes)
        yield from _of_writes(path, dim, sizes.rows, sizes.miss_rows)


def _of_wide_table(path: Path, sizes: LoopSizes) -> Iterator[Loop]:
    rows = max(64, int(sizes.rows * _WIDE_SHARE))
    _fill(path, _WIDE_DIM, rows)
    yield from _of_writes(path, _WIDE_DIM, rows, max(8, sizes.miss_rows // 8))


def _batches(sizes: LoopSizes, exponent: float, pooling_factor: int) -> list[KeyedJaggedTensor]:
    """Ids by Zipf's law; popular rows lie anywhere. For one exponent the ids are the same however they are pooled."""
    generator, ids = np.random.default_rng(0), sizes.samples * sizes.pooling_factor
    cumulated = np.cumsum(np.arange(1, sizes.rows + 1, dtype=np.float64) ** -exponent)
    places = generator.permutation(sizes.rows)
    drawn = np.searchsorted(cumulated, generator.random((_BATCHES, ids)) * cumulated[-1])
    return [_jagged(places[np.minimum(ranks, sizes.rows - 1)], pooling_factor) for ranks in drawn]


def _in_memory(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with _opened(path, dim, 2 * sizes.rows) as subject:
        _read_all(subject, sizes)
        for exponent in _EXPONENTS:
            for pooling_factor in (1, sizes.pooling_factor):
                name = f"{subject.name}, {pooling_factor} a bag, {'popular' if exponent else 'any'} rows"
                yield from _lookup_and_training(subject, name, _batches(sizes, exponent, pooling_factor), sizes.passes)
        if dim == _TINY_DIM:
            one_id = [_jagged(np.array([row]), 1) for row in range(_BATCHES)]
            yield from _lookup_and_training(subject, "one id", one_id, sizes.passes)


def _read_all(subject: _Subject, sizes: LoopSizes) -> None:
    for first in range(0, sizes.rows, _CHUNK):
        subject.store["t0"].read(torch.arange(first, min(first + _CHUNK, sizes.rows)))


def _threads(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    cores, taken = default_threads(), []
    shared = replace(sizes, samples=max(sizes.samples, cores * MIN_WORK // sizes.pooling_factor))
    batches = _batches(shared, _EXPONENTS[0], sizes.pooling_factor)
    for threads in (1, cores) if cores > 1 else ():
        with torch_threads(threads), _opened(path, dim, 2 * sizes.rows, threads=threads) as subject:
            _read_all(subject, sizes)
            taken.append(_median_ns(subject.trainer(batches[0]), batches, sizes.passes, time.perf_counter))
    if taken:
        kept = 1000 * (1 - 1 / cores)  # not divided
        work = {"share_us": 2000, "batch_us": kept, "step_us": kept}
        yield Loop(f"training on {cores} cores, rows of {dim} columns", "threads", taken[1], work, taken[0] / cores)


def _lookup_and_training(subject: _Subject, name: str, batches: list[KeyedJaggedTensor], passes: int) -> Iterator[Loop]:
    amounts = Amounts.of(batches, subject.layout)
    lookup_ns = _median_ns(subject.forward, batches, passes)
    step_ns = _median_ns(subject.trainer(batches[0]), batches, passes)
    yield Loop(f"lookup, {name}", "lookup", lookup_ns, amounts.lookup())
    yield Loop(f"training beyond lookup, {name}", "training", max(step_ns - lookup_ns, 1.0), amounts.training())


def _hits(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    with _opened(path, dim, sizes.rows * _HIT_SHARE) as subject:
        assert subject.store.stats().ddr.capacity_rows < sizes.rows, "else no row is looked for"
        for exponent in _EXPONENTS:
            batches = _batches(sizes, exponent, sizes.pooling_factor)
            for batch in batches:
                subject.forward(batch)
            before = subject.store.stats().ddr.misses
            ns = _median_ns(subject.forward, batches, sizes.passes)
            assert subject.store.stats().ddr.misses == before, "the cache holds every row that the batches use"
            name = f"lookup in a cache, {subject.name}, {'popular' if exponent else 'any'} rows"
            amounts = Amounts.of(batches, subject.layout)
            yield Loop(name, "hits", ns, amounts.admitting() | amounts.lookup())


def _misses(path: Path, dim: int, sizes: LoopSizes) -> Iterator[Loop]:
    warm(path / _ROWS_FILE)
    with _opened(path, dim, sizes.rows * _MISS_SHARE) as subject:
        draw = _drawn(sizes.rows, sizes.pooling_factor)
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.forward(draw(sizes.miss_rows))
        batches = [draw(sizes.miss_rows) for _ in range(_MISS_BATCHES)]
        before = _Counts.by(subject)
        ns = statistics.median(_ns(subject.forward, batch) for batch in batches)
        missing = _Counts.by(subject).since(before, len(batches)).misses
        amounts = Amounts.of(batches, subject.layout)
        work = amounts.admitting() | amounts.lookup() | per_byte("miss", missing, subject.layout.row_bytes)
        yield Loop(f"missed lookup, {subject.name}", "misses", ns, work)


def _drawn(rows: int, pooling_factor: int = 1) -> Callable[[int], KeyedJaggedTensor]:
    """Gives the next batch of so many ids, any rows, each as likely."""
    generator = np.random.default_rng(1)
    return lambda count: _jagged(generator.integers(0, rows, count), pooling_factor)


def _cold(path: Path, dim: int, sizes: LoopSizes) -> Loop:
    """As misses, in batches that a slow device reads in time; by turns from the page cache and from the device."""
    rows = min(sizes.miss_rows, sizes.cold_rows) // sizes.pooling_factor * sizes.pooling_factor
    differences, pages = [], []
    with _opened(path, dim, sizes.rows * _MISS_SHARE) as subject:
        draw, count = _drawn(sizes.rows, sizes.pooling_factor), max(rows, sizes.pooling_factor)
        for _ in range(_COLD_BATCHES):
            warm(path / _ROWS_FILE)
            warm_ns = _ns(subject.forward, draw(count))
            drop(path / _ROWS_FILE)
            before = _Counts.by(subject)
            cold_ns = _ns(subject.forward, draw(count))
            pages.append(_Counts.by(subject).since(before).pages)
            differences.append(cold_ns - warm_ns)
    ns = max(statistics.median(differences), 1.0)
    return Loop(f"reads beyond misses, {subject.name}", "cold", ns, {"read_ns": statistics.median(pages)})


def _of_writes(path: Path, dim: int, rows: int, miss_rows: int) -> Iterator[Loop]:
    """``miss_rows``: at most so many in a step."""
    warm(path / _ROWS_FILE)
    draw = _drawn(rows)
    for stage, part, rounds in _WRITE_LOOPS:
        cached = max(_LEAST_CACHED, rows // part)
        count = max(8, min(miss_rows, cached) // 2)
        with _opened(path, dim, cached) as subject:
            train, layout = subject.trainer(draw(count)), subject.layout
            while subject.store.stats().ssd.rows_written < rounds * rows:
                train(draw(count))
            batches = [draw(count) for _ in range(max(1, int(rows * _TIMED_SHARE) // count))]
            before, began = _Counts.by(subject), time.process_time()
            for batch in batches:
                train(batch)
            ns = 1e9 * (time.process_time() - began) / len(batches)
            amounts, counts = Amounts.of(batches, layout), _Counts.by(subject).since(before, len(batches))
            looked_up = amounts.admitting() | amounts.lookup() | per_byte("miss", counts.misses, layout.row_bytes)
            work = looked_up | amounts.training() | counts.writing(layout)
            yield Loop(f"{stage}, {subject.name}, 1 of {part} cached", stage, ns, work)


# Many tables


def _of_tables(path: Path, sizes: LoopSizes) -> Iterator[Loop]:
    each = max(256, sizes.rows // _TABLES)
    _fill(path, _TABLES_DIM, each, tables=_TABLES)
    with _opened(path, _TABLES_DIM, each * _TABLES * _AHEAD_CACHED_SHARE) as subject:
        yield from _ahead(subject, int(each * _AHEAD_USED_SHARE))


def _ahead(subject: _Subject, rows: int) -> Iterator[Loop]:
    generator, ids = np.random.default_rng(2), _TABLES * _AHEAD_IDS
    count = _AHEAD_WARM_STEPS + _AHEAD_STEPS
    batches = [_jagged(generator.integers(0, rows, ids), 1, tables=_TABLES) for _ in range(count)]
    _trained_ahead(subject, batches[:_AHEAD_WARM_STEPS])
    before = _Counts.by(subject)
    own_ns, others_ns = _trained_ahead(subject, batches[_AHEAD_WARM_STEPS:])
    counts, layout = _Counts.by(subject).since(before, _AHEAD_STEPS), subject.layout
    amounts = Amounts(ids, counts.unique, ids, layout)
    computing = amounts.lookup() | amounts.training()
    yield Loop("steps whose batches are brought in ahead", "hand-over", own_ns, {"hand_over_us": 1000, **computing})
    bringing = amounts.admitting() | per_byte("miss", counts.read, layout.row_bytes) | counts.writing(layout)
    yield Loop("bringing them in ahead", "ahead", others_ns, {"ahead_us": 1000, **bringing})


def _trained_ahead(subject: _Subject, batches: list[KeyedJaggedTensor]) -> tuple[float, float]:
    """Nanoseconds of a step: of the thread that computes, and of all others."""
    train = subject.trainer(batches[0])
    whole, own = time.process_time(), time.thread_time()
    with contextlib.closing(prefetch(batches, subject.module, depth=_AHEAD_DEPTH)) as ahead:
        for batch in ahead:
            train(batch)
    own = time.thread_time() - own
    others = time.process_time() - whole - own
    return max(1e9 * own / len(batches), 1.0), max(1e9 * others / len(batches), 1.0)
