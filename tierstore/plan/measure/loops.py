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
from ...kernels.arrays import Int64s
from ...kernels.least_squares import solve_nonnegative
from ...models import DLRM
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...nn.prefetch import prefetch
from ...rows import RowLayout
from ...store import Store, open_store
from ..dense import dlrm_work
from ..host import TRAINING_FLOPS, Processor, SoftwareCosts
from .machine import torch_threads
from .page_cache import drop, warm

ROWS, IDS, PASSES = 200_000, 4096, 10
"""Of a lab with all the time that it wants."""
_NARROW, _WIDE, _MANY_DIM = 16, 128, 64
_CACHED_BYTES: Final = 60
"""A cached row takes about so much beside itself."""
_SLACK: Final = 1.2
"""Of the budget an eighth is for transactions."""
_STAGING_BYTES: Final = 512 << 10
_CHUNK: Final = 100_000
_BATCHES: Final = 8
_MISS_PART: Final = 8
"""The cache holds one row of so many where batches miss."""
_WRITE_LOOPS: Final = ((_NARROW, 8), (_NARROW, 64), (_WIDE, 8))
"""Columns, and of how many rows the cache holds one: that decides how many rows a transaction has."""
_WRITTEN_BEFORE, _WRITTEN = 1 / 4, 1 / 2
"""Of the rows: so few that no room has to be won back."""
_TABLES: Final = 32
_AHEAD_IDS: Final = 64
"""For each table, of batches that are fetched ahead."""
_AHEAD_STEPS: Final = 60
_NUM_DENSE: Final = 13
_DENSE: Final = (({"bottom_mlp": (32,), "top_mlp": (32,)}, 64), ({"bottom_mlp": (), "top_mlp": (64,) * 4}, 2048))
"""Layers and samples: next to no work a product, and many values."""
_DENSE_TABLES, _DENSE_DIM = 8, 16


class Lab(NamedTuple):
    """How much is done, and where.

    Attributes:
        rows: of a store; together far more than the processor's caches hold.
        ids: of a batch.
        cold_ids: of a batch that is read from the device.
        passes: over the batches whose rows are in memory.
    """

    folder: Path
    processor: Processor
    rows: int
    ids: int
    cold_ids: int
    passes: int

    @contextlib.contextmanager
    def opened(self, dim: int, cached_rows: float, *, tables: int = 1) -> Iterator["_Subject"]:
        """A store of rows that were all written, with a cache of about so many; as it was made."""
        path, each = self.folder / f"store-{dim}", self.rows // tables
        if not path.exists():
            _fill(path, dim, each, tables)
        layout = RowLayout(dim=dim, state_dim=1)
        ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _CACHED_BYTES) * _SLACK)
        warm(path / ROW_FILE_NAME)
        with open_store(path, mode="w", ddr=ddr, threads=1) as store:
            yield _Subject(store, TieredEmbeddingBagCollection(store), layout)
            store.rollback(store.version)

    def draw(self) -> Callable[[int], KeyedJaggedTensor]:
        """Gives the next batch of so many ids, any rows, one a bag."""
        generator = np.random.default_rng(1)
        return lambda count: _jagged(generator.integers(0, self.rows, count))


def measure_costs(lab: Lab, progress: Callable[[float], None] = lambda _share: None) -> SoftwareCosts:
    """Time all loops, on stores that are made in the lab's folder.

    Args:
        progress: called with the share that is done, from 0 to 1.
    """
    costs, loops = SoftwareCosts(), (_fixed_and_bytes, _ids, _misses, _reads, _writes, _ahead, _dense)
    with torch_threads(1):
        for number, loop in enumerate(loops, 1):
            costs = loop(lab, costs)
            progress(number / len(loops))
    return costs


# Stores


class _Subject(NamedTuple):
    """A store that is open, and the module over its tables."""

    store: Store
    module: TieredEmbeddingBagCollection
    layout: RowLayout

    @property
    def file(self) -> Path:
        return self.store.directory / ROW_FILE_NAME

    def forward(self, batch: KeyedJaggedTensor) -> None:
        with torch.no_grad():
            self.module(batch)

    def train(self, batch: KeyedJaggedTensor) -> None:
        pooled: Tensor = self.module(batch).values()
        pooled.backward(torch.full_like(pooled, 1e-3))  # type: ignore[no-untyped-call]

    def read_all(self) -> None:
        table = self.store["t0"]
        for first in range(0, table.config.num_embeddings, _CHUNK):
            table.read(torch.arange(first, min(first + _CHUNK, table.config.num_embeddings)))


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


def _jagged(ids: Int64s, *, tables: int = 1) -> KeyedJaggedTensor:
    """Bags of one id, an equal part of them for each table."""
    names = [f"f{number}" for number in range(tables)]
    return KeyedJaggedTensor(names, torch.from_numpy(ids), offsets=torch.arange(len(ids) + 1))


def transactions_in(path: Path) -> int:
    """That were ever made in a store's file, by the newer of its two meta pages."""
    with path.open("rb", buffering=0) as file:
        first = parse_meta(os.pread(file.fileno(), META_READ_BYTES, 0))
        assert not isinstance(first, str), first
        second = parse_meta(os.pread(file.fileno(), META_READ_BYTES, first.page_bytes))
        assert not isinstance(second, str), second
    return max(first.txn_id, second.txn_id)


class _Counts(NamedTuple):
    """What a store has done: distinct rows of batches, those read from SSD, pages read for them, rows written,
    transactions."""

    unique: float
    read: float
    pages: float
    written: float
    transactions: float

    @classmethod
    def of(cls, subject: _Subject) -> "_Counts":
        ddr, ssd = subject.store.stats().ddr, subject.store.stats().ssd
        pages, transactions = ssd.bytes_read / subject.layout.page_bytes, transactions_in(subject.file)
        return cls(ddr.unique, ssd.lookups, pages, ssd.rows_written, transactions)

    def since(self, before: "_Counts", steps: int) -> "_Counts":
        """In each of so many steps."""
        return _Counts(*((now - then) / steps for now, then in zip(self, before, strict=True)))


# Clocks, and what is known of a loop


def _ns(work: Callable[[Any], None], batch: Any, clock: Callable[[], float] = time.thread_time) -> float:
    began = clock()
    work(batch)
    return 1e9 * (clock() - began)


def _median_ns(work: Callable[[Any], None], batches: Sequence[Any], passes: int) -> float:
    """Of a batch, after one pass that does not count."""
    for batch in batches:
        work(batch)
    return statistics.median(_ns(work, batch) for _ in range(passes) for batch in batches)


def _amounts(batches: Sequence[KeyedJaggedTensor], layout: RowLayout) -> dict[str, Any]:
    """Of a batch of one table, as ``SoftwareCosts.lookup_ns`` takes them."""
    rows = statistics.mean(len(np.unique(batch.values().numpy())) for batch in batches)
    ids = statistics.mean(len(batch.values()) for batch in batches)
    return {"ids": ids, "rows": rows, "bags": ids, "layout": layout}


def _training_ns(costs: SoftwareCosts, amounts: dict[str, Any]) -> float:
    return 1e3 * TRAINING_FLOPS * costs.batch_us + costs.lookup_ns(**amounts) + costs.update_ns(**amounts)


def _fetching_ns(costs: SoftwareCosts, amounts: dict[str, Any], counts: _Counts) -> float:
    admission = costs.admission_ns(ids=amounts["ids"], rows=amounts["rows"])
    return admission + counts.read * costs.miss_row_ns(amounts["layout"])


def _left(ns: float, known_ns: float, units: float) -> float:
    """Of a loop, for each unit; never less than nothing."""
    return max(0.0, ns - known_ns) / units


# Loops


def _fixed_and_bytes(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Training of one id; lookups of wide rows, all in memory."""
    with lab.opened(_WIDE, 2 * lab.rows) as subject:
        subject.read_all()
        one = [_jagged(np.array([row])) for row in range(_BATCHES)]
        costs = replace(costs, batch_us=_median_ns(subject.train, one, lab.passes) / 1e3 / TRAINING_FLOPS)
        draw = lab.draw()
        batches = [draw(lab.ids) for _ in range(_BATCHES)]
        bytes_read = SoftwareCosts(byte_ns=1.0).lookup_ns(**_amounts(batches, subject.layout))
        ns = _median_ns(subject.forward, batches, lab.passes)
        return replace(costs, byte_ns=_left(ns, 1e3 * costs.batch_us, bytes_read))


def _ids(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Training of narrow rows, all in memory."""
    with lab.opened(_NARROW, 2 * lab.rows) as subject:
        subject.read_all()
        draw = lab.draw()
        batches = [draw(lab.ids) for _ in range(_BATCHES)]
        amounts = _amounts(batches, subject.layout)
        ns = _median_ns(subject.train, batches, lab.passes)
        return replace(costs, id_ns=_left(ns, _training_ns(costs, amounts), amounts["ids"] + amounts["rows"]))


def _misses(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Lookups of rows that are not cached, their pages in the system's page cache."""
    with lab.opened(_WIDE, lab.rows / _MISS_PART) as subject:
        draw = lab.draw()
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.forward(draw(lab.ids))
        batches, before = [draw(lab.ids) for _ in range(_BATCHES)], _Counts.of(subject)
        ns = statistics.median(_ns(subject.forward, batch) for batch in batches)
        amounts, counts = _amounts(batches, subject.layout), _Counts.of(subject).since(before, _BATCHES)
        known = 1e3 * costs.batch_us + costs.lookup_ns(**amounts) + _fetching_ns(costs, amounts, counts)
        return replace(costs, miss_ns=_left(ns, known, counts.read))


def _reads(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """The same with pages from the device, in batches that a slow one reads in time; and from memory, by turns."""
    beyond, pages = [], []
    with lab.opened(_WIDE, lab.rows / _MISS_PART) as subject:
        draw = lab.draw()
        for _ in range(_BATCHES // 2):
            warm(subject.file)
            warm_ns = _ns(subject.forward, draw(lab.cold_ids))
            drop(subject.file)
            before = _Counts.of(subject)
            beyond.append(_ns(subject.forward, draw(lab.cold_ids)) - warm_ns)
            pages.append(_Counts.of(subject).since(before, 1).pages)
    return replace(costs, read_ns=_left(statistics.median(beyond), 0.0, statistics.median(pages)))


def _writes(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Training steps that evict as many dirty rows as they fetch: three loops for three costs."""
    equations, left = [], []
    for dim, part in _WRITE_LOOPS:
        cached = lab.rows // part
        count = max(8, min(lab.ids, cached) // 2)
        with lab.opened(dim, cached) as subject:
            draw = lab.draw()
            while subject.store.stats().ssd.rows_written < _WRITTEN_BEFORE * lab.rows:
                subject.train(draw(count))
            batches = [draw(count) for _ in range(max(1, int(_WRITTEN * lab.rows) // count))]
            before, began = _Counts.of(subject), time.process_time()
            for batch in batches:
                subject.train(batch)
            ns = 1e9 * (time.process_time() - began) / len(batches)
            amounts, counts = _amounts(batches, subject.layout), _Counts.of(subject).since(before, len(batches))
            known = _training_ns(costs, amounts) + _fetching_ns(costs, amounts, counts)
            work = [counts.written, counts.written * subject.layout.row_bytes, 1e3 * counts.transactions]
            equations.append(np.array(work) / ns)  # relative errors count
            left.append(max(0.0, 1 - known / ns))
    row, byte, transaction = solve_nonnegative(np.array(equations), np.array(left)).tolist()
    return replace(costs, append_ns=row, append_ns_per_byte=byte, transaction_us=transaction)


def _ahead(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Training steps over many tables whose batches are fetched ahead: a fifth of a quarter of the rows is cached."""
    used, ids, generator = lab.rows // _TABLES // 4, _TABLES * _AHEAD_IDS, np.random.default_rng(2)
    with lab.opened(_MANY_DIM, lab.rows / 20, tables=_TABLES) as subject:
        batches = [_jagged(generator.integers(0, used, ids), tables=_TABLES) for _ in range(3 * _AHEAD_STEPS)]
        _train_ahead(subject, batches[_AHEAD_STEPS:])
        before, began = _Counts.of(subject), time.process_time()
        _train_ahead(subject, batches[:_AHEAD_STEPS])
        ns = 1e9 * (time.process_time() - began) / _AHEAD_STEPS
        counts, layout = _Counts.of(subject).since(before, _AHEAD_STEPS), subject.layout
    amounts = {"ids": ids, "rows": counts.unique, "bags": ids, "layout": layout}
    writing = counts.written * costs.append_row_ns(layout) + 1e3 * counts.transactions * costs.transaction_us
    known = _training_ns(costs, amounts) + _fetching_ns(costs, amounts, counts) + writing
    return replace(costs, ahead_us=_left(ns, known, 1e3))


def _train_ahead(subject: _Subject, batches: list[KeyedJaggedTensor]) -> None:
    with contextlib.closing(prefetch(batches, subject.module, depth=2)) as ahead:
        for batch in ahead:
            subject.train(batch)


def _dense(lab: Lab, costs: SoftwareCosts) -> SoftwareCosts:
    """Training steps of two dense models, the smaller one also on one thread: three loops for three costs."""
    equations, left, cores = [], [], lab.processor.cores
    for layers, samples, threads in (*((*each, cores) for each in _DENSE), (*_DENSE[0], 1)):
        rest: dict[str, Any] = {"interaction": "dot", "cross_layers": 1, "cross_rank": 0, "num_dense": _NUM_DENSE}
        work = dlrm_work([_DENSE_DIM] * _DENSE_TABLES, **layers, **rest)
        with torch_threads(threads):
            ns = _dense_step_ns({**layers, **rest}, samples, lab.passes)
        known = 1e9 * TRAINING_FLOPS * samples * work.dense_flops / (lab.processor.flops * threads / cores)
        product, wake = (
            SoftwareCosts(**{name: 1.0}).dense_ns(work, samples=samples, threads=threads, is_training=True)[0]
            for name in ("dense_product_us", "wake_us")
        )
        value = SoftwareCosts(dense_value_ns=1.0).dense_ns(work, samples=samples, threads=threads, is_training=True)[1]
        equations.append(np.array([product, wake, value]) / ns)
        left.append(max(0.0, 1 - known / ns))
    product, wake, value = solve_nonnegative(np.array(equations), np.array(left)).tolist()
    return replace(costs, dense_product_us=product, wake_us=wake, dense_value_ns=value)


def _dense_step_ns(layers: dict[str, Any], samples: int, passes: int) -> float:
    """The fastest: elapsed time grows by what others take of the cores. Rows are given and their gradient is taken."""
    model = DLRM(nn.Identity(), num_features=_DENSE_TABLES, embedding_dim=_DENSE_DIM, **layers)
    rule, labels = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(samples)
    dense = torch.rand(samples, _NUM_DENSE)
    pooled = torch.rand(samples, _DENSE_TABLES * _DENSE_DIM, requires_grad=True)

    def step(_batch: None) -> None:
        rule.zero_grad()
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model.dense_part(dense, pooled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None

    for _ in range(3):
        step(None)
    return min(_ns(step, None, time.perf_counter) for _ in range(3 * passes))
