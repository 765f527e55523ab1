"""tierstore's own work: small stores, and a loop for each cost.

A loop is chosen so that its cost takes much of it, and what is known from the loops before is taken off. Loops are on
one core, in its own processor time, so neither other processes nor waits for a device are in them. Other threads write
rows and fetch them ahead: there the whole process's time counts. Dense models run on all cores, by the clock.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ... import optim
from ...config import TableConfig
from ...io import ROW_FILE_NAME
from ...io.btree import META_READ_BYTES, parse_meta
from ...kernels.arrays import Float64s, Int64s
from ...kernels.least_squares import solve_nonnegative
from ...layout import RowLayout
from ...models import DLRM
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...nn.prefetch import prefetch
from ...store import Store, open_store
from ..dense import dlrm_work
from ..host import TRAINING_FLOPS, Processor, SoftwareCosts
from .machine import torch_threads
from .page_cache import drop, warm

ROWS, IDS, PASSES = 200_000, 4096, 10
"""Of a lab with all the time that it wants."""
_NARROW, _WIDE, _MANY_DIM = 16, 128, 64
_ROW_EXTRA_BYTES, _STAGING_BYTES, _SLACK = 60, 512 << 10, 1.2
"""Of a budget: what a cached row takes beside itself, what a store takes at least, and an eighth for transactions."""
_CHUNK: Final = 100_000
_BATCHES: Final = 8
_MISS_PART: Final = 8
"""The cache holds one row of so many where batches miss."""
_WRITE_LOOPS: Final = ((_NARROW, 8), (_NARROW, 64), (_WIDE, 8))
"""Columns, and of how many rows the cache holds one: that decides how many rows a transaction has."""
_WRITTEN_BEFORE, _WRITTEN = 1 / 4, 1 / 2
"""Of the rows: so few that no room has to be won back."""
_TABLES, _AHEAD_IDS, _AHEAD_STEPS = 32, 64, 60
"""Of batches that are fetched ahead; ids of each table."""
_DENSE: Final = (({"bottom_mlp": (32,), "top_mlp": (32,)}, 64), ({"bottom_mlp": (), "top_mlp": (64,) * 4}, 2048))
"""Layers and samples: next to no work a product, and many values."""
_DENSE_REST: Final = {"interaction": "dot", "cross_layers": 1, "cross_rank": 0, "num_dense": 13}
_DENSE_TABLES, _DENSE_DIM = 8, 16


class Lab(NamedTuple):
    """How much is done, and where."""

    folder: Path
    processor: Processor
    rows: int
    ids: int
    cold_ids: int
    passes: int

    @contextlib.contextmanager
    def opened(self, dim: int, cached_rows: float, *, tables: int = 1) -> Iterator["_Subject"]:
        """A store of rows that were all written, with a cache of about so many; as it was made."""
        path, layout = self.folder / f"store-{dim}", RowLayout(dim=dim, state_dim=1)
        if not path.exists():
            _fill(path, dim, self.rows // tables, tables)
        ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _ROW_EXTRA_BYTES) * _SLACK)
        warm(path / ROW_FILE_NAME)
        with open_store(path, mode="w", ddr=ddr, threads=1) as store:
            yield _Subject(store, TieredEmbeddingBagCollection(store), layout, np.random.default_rng(1))
            store.rollback(store.version)

    @contextlib.contextmanager
    def in_memory(self, dim: int) -> Iterator["_Subject"]:
        with self.opened(dim, 2 * self.rows) as subject:
            for first in range(0, self.rows, _CHUNK):
                subject.store["t0"].read(torch.arange(first, min(first + _CHUNK, self.rows)))
            yield subject


def measure_costs(lab: Lab, progress: Callable[[float], None] = lambda _share: None) -> SoftwareCosts:
    """Time all loops, on stores that are made in the lab's folder."""
    costs, loops = SoftwareCosts(), (_in_memory, _misses, _reads, _writes, _ahead, _dense)
    with torch_threads(1):
        for number, loop in enumerate(loops, 1):
            costs = replace(costs, **loop(lab, costs))
            progress(number / len(loops))
    return costs


# Stores


class _Subject(NamedTuple):
    """A store that is open, and the module over its tables."""

    store: Store
    module: TieredEmbeddingBagCollection
    layout: RowLayout
    generator: np.random.Generator

    @property
    def file(self) -> Path:
        return self.store.directory / ROW_FILE_NAME

    def batches(self, number: int, ids: int) -> list[KeyedJaggedTensor]:
        """Of any rows of the one table, one id a bag."""
        rows = self.store["t0"].config.num_embeddings
        return [_jagged(self.generator.integers(0, rows, ids)) for _ in range(number)]

    def forward(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.module(batch)

    def train(self, batch: KeyedJaggedTensor) -> None:
        pooled: Tensor = self.module(batch).values()
        pooled.backward(torch.full_like(pooled, 1e-3))  # type: ignore[no-untyped-call]

    def done(self) -> Float64s:
        """Rows read from SSD, pages read for them, rows written, and transactions."""
        ssd = self.store.stats().ssd
        pages = ssd.bytes_read / self.layout.page_bytes
        return np.array([ssd.lookups, pages, ssd.rows_written, transactions_in(self.file)], np.float64)


def _fill(path: Path, dim: int, rows: int, tables: int) -> None:
    with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
        for number in range(tables):
            config = TableConfig(
                name=f"t{number}", num_embeddings=rows, embedding_dim=dim, feature_names=(f"f{number}",), pooling="sum",
                optimizer=optim.RowWiseAdagrad(lr=0.01),
            )  # fmt: skip
            table = store.create_table(config)
            for first in range(0, rows, _CHUNK):
                ids = torch.arange(first, min(first + _CHUNK, rows))
                table.write(ids, torch.full((len(ids), dim), 0.01))
        store.commit()


def _jagged(ids: Int64s) -> KeyedJaggedTensor:
    """Bags of one id; of several tables int64 [tables, ids]."""
    names = [f"f{number}" for number in range(len(np.atleast_2d(ids)))]
    return KeyedJaggedTensor(names, torch.from_numpy(ids.ravel()), offsets=torch.arange(ids.size + 1))


def transactions_in(path: Path) -> int:
    """That were ever made in a store's file, by the newer of its two meta pages."""
    with path.open("rb", buffering=0) as file:
        first = parse_meta(os.pread(file.fileno(), META_READ_BYTES, 0))
        assert not isinstance(first, str), first
        second = parse_meta(os.pread(file.fileno(), META_READ_BYTES, first.page_bytes))
        assert not isinstance(second, str), second
    return max(first.txn_id, second.txn_id)


class _Loop(NamedTuple):
    """A batch of a loop: its nanoseconds, ids and distinct rows, and what the store did."""

    layout: RowLayout
    ns: float
    ids: float
    rows: float
    read: float
    pages: float
    written: float
    transactions: float

    @property
    def amounts(self) -> dict[str, Any]:
        """As ``SoftwareCosts.lookup_ns`` takes them."""
        return {"ids": self.ids, "rows": self.rows, "bags": self.ids, "layout": self.layout}

    def left_ns(self, costs: SoftwareCosts, *, is_training: bool, is_in_memory: bool = False) -> float:
        """Beyond what the costs that are known explain; never less than nothing."""
        known = 1e3 * costs.batch_us * (TRAINING_FLOPS if is_training else 1) + costs.lookup_ns(**self.amounts)
        if is_training:
            known += costs.update_ns(**self.amounts)
        if not is_in_memory:
            known += costs.admission_ns(ids=self.ids, rows=self.rows) + self.read * costs.miss_row_ns(self.layout)
        known += self.written * costs.append_row_ns(self.layout) + 1e3 * self.transactions * costs.transaction_us
        return max(0.0, self.ns - known)


def _timed(
    subject: _Subject,
    work: Callable[[Any], None],
    batches: Sequence[KeyedJaggedTensor],
    *,
    passes: int = 1,
    clock: Callable[[], float] = time.thread_time,
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> _Loop:
    before, taken = subject.done(), []
    for batch in [*batches] * passes:
        began = clock()
        work(batch)
        taken.append(clock() - began)
    return _loop(subject, 1e9 * middle(taken), batches, (subject.done() - before) / len(taken))


def _loop(subject: _Subject, ns: float, batches: Sequence[KeyedJaggedTensor], done: Float64s) -> _Loop:
    ids = np.stack([batch.values().numpy().reshape(len(batch.keys()), -1) for batch in batches])
    rows = sum(len(np.unique(each)) for batch in ids for each in batch) / len(batches)
    return _Loop(subject.layout, ns, float(ids[0].size), rows, *done.tolist())


# Loops: each gives the costs that it finds


def _in_memory(lab: Lab, costs: SoftwareCosts) -> dict[str, float]:
    """All rows cached: training of one id, lookups of wide rows, training of narrow ones."""
    with lab.in_memory(_WIDE) as subject:
        one = _warm(subject, subject.train, lab, 1).left_ns(costs, is_training=True, is_in_memory=True)
        costs = replace(costs, batch_us=one / 1e3 / TRAINING_FLOPS)
        found = _warm(subject, subject.forward, lab, lab.ids)
    moved = SoftwareCosts(byte_ns=1.0).lookup_ns(**found.amounts)
    costs = replace(costs, byte_ns=found.left_ns(costs, is_training=False, is_in_memory=True) / moved)
    with lab.in_memory(_NARROW) as subject:
        found = _warm(subject, subject.train, lab, lab.ids)
    id_ns = found.left_ns(costs, is_training=True, is_in_memory=True) / (found.ids + found.rows)
    return {"batch_us": costs.batch_us, "byte_ns": costs.byte_ns, "id_ns": id_ns}


def _warm(subject: _Subject, work: Callable[[Any], None], lab: Lab, ids: int) -> _Loop:
    batches = subject.batches(_BATCHES, ids)
    _timed(subject, work, batches)
    return _timed(subject, work, batches, passes=lab.passes)


def _misses(lab: Lab, costs: SoftwareCosts) -> dict[str, float]:
    """Lookups of rows that are not cached, their pages in the system's page cache."""
    with lab.opened(_WIDE, lab.rows / _MISS_PART) as subject:
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.forward(*subject.batches(1, lab.ids))
        found = _timed(subject, subject.forward, subject.batches(_BATCHES, lab.ids))
    return {"miss_ns": found.left_ns(costs, is_training=False) / found.read}


def _reads(lab: Lab, _costs: SoftwareCosts) -> dict[str, float]:
    """The same with pages from the device, in batches that a slow one reads in time; and from memory, by turns."""
    each_ns = []
    with lab.opened(_WIDE, lab.rows / _MISS_PART) as subject:
        for _ in range(_BATCHES // 2):
            warm(subject.file)
            in_memory = _timed(subject, subject.forward, subject.batches(1, lab.cold_ids))
            drop(subject.file)
            cold = _timed(subject, subject.forward, subject.batches(1, lab.cold_ids))
            each_ns.append((cold.ns - in_memory.ns) / cold.pages)
    return {"read_ns": max(0.0, statistics.median(each_ns))}


def _writes(lab: Lab, costs: SoftwareCosts) -> dict[str, float]:
    """Training steps that evict as many dirty rows as they fetch: three loops for three costs."""
    equations, left = [], []
    for dim, part in _WRITE_LOOPS:
        count = max(8, min(lab.ids, lab.rows // part) // 2)
        with lab.opened(dim, lab.rows // part) as subject:
            while subject.store.stats().ssd.rows_written < _WRITTEN_BEFORE * lab.rows:
                subject.train(*subject.batches(1, count))
            batches = subject.batches(max(1, int(_WRITTEN * lab.rows) // count), count)
            found = _timed(subject, subject.train, batches, clock=time.process_time, middle=statistics.fmean)
        work = np.array([found.written, found.written * found.layout.row_bytes, 1e3 * found.transactions])
        equations.append(work / found.ns)  # relative errors count
        left.append(found.left_ns(costs, is_training=True) / found.ns)
    return _solved(equations, left, ("append_ns", "append_ns_per_byte", "transaction_us"))


def _ahead(lab: Lab, costs: SoftwareCosts) -> dict[str, float]:
    """Training steps over many tables whose batches are fetched ahead: a fifth of a quarter of the rows is cached."""
    with lab.opened(_MANY_DIM, lab.rows / 20, tables=_TABLES) as subject:
        shape = (3 * _AHEAD_STEPS, _TABLES, _AHEAD_IDS)
        batches = list(map(_jagged, subject.generator.integers(0, lab.rows // _TABLES // 4, shape)))
        _train_ahead(subject, batches[_AHEAD_STEPS:])
        before, began = subject.done(), time.process_time()
        _train_ahead(subject, batches[:_AHEAD_STEPS])
        ns = 1e9 * (time.process_time() - began) / _AHEAD_STEPS
        found = _loop(subject, ns, batches[:_AHEAD_STEPS], (subject.done() - before) / _AHEAD_STEPS)
    return {"ahead_us": found.left_ns(costs, is_training=True) / 1e3}


def _train_ahead(subject: _Subject, batches: list[KeyedJaggedTensor]) -> None:
    with contextlib.closing(prefetch(batches, subject.module, depth=2)) as ahead:
        for batch in ahead:
            subject.train(batch)


def _dense(lab: Lab, _costs: SoftwareCosts) -> dict[str, float]:
    """Training steps of two dense models, the smaller one also on one thread: three loops for three costs."""
    equations, left, cores = [], [], lab.processor.cores
    names = ("dense_product_us", "wake_us", "dense_value_ns")
    for layers, samples, threads in (*((*each, cores) for each in _DENSE), (*_DENSE[0], 1)):
        shape: dict[str, Any] = {**layers, **_DENSE_REST}
        work = dlrm_work([_DENSE_DIM] * _DENSE_TABLES, **shape)
        with torch_threads(threads):
            ns = _dense_step_ns(shape, samples, lab.passes)
        known = 1e9 * TRAINING_FLOPS * samples * work.dense_flops / (lab.processor.flops * threads / cores)
        each = {"samples": samples, "threads": threads, "is_training": True}
        equations.append(np.array([sum(SoftwareCosts(**{name: 1.0}).dense_ns(work, **each)) for name in names]) / ns)
        left.append(max(0.0, 1 - known / ns))
    return _solved(equations, left, names)


def _dense_step_ns(layers: dict[str, Any], samples: int, passes: int) -> float:
    """The fastest: elapsed time grows by what others take of the cores. Rows are given and their gradient is taken."""
    model = DLRM(nn.Identity(), num_features=_DENSE_TABLES, embedding_dim=_DENSE_DIM, **layers)
    rule, labels = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(samples)
    dense = torch.rand(samples, layers["num_dense"])
    pooled = torch.rand(samples, _DENSE_TABLES * _DENSE_DIM, requires_grad=True)

    def step() -> float:
        began = time.perf_counter()
        rule.zero_grad()
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model.dense_part(dense, pooled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None
        return 1e9 * (time.perf_counter() - began)

    return min(step() for _ in range(3 + 3 * passes))


def _solved(equations: Sequence[Float64s], left: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    return dict(zip(names, solve_nonnegative(np.array(equations), np.array(left)).tolist(), strict=True))
