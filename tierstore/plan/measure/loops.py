"""tierstore's own work: small stores, and loops for each cost.

A loop is chosen so that its cost takes much of it; what the costs before explain is taken off. Loops over stores are on
one core, in its own processor time, so neither other processes nor waits for a device are in them. Another thread
writes rows: there the whole process's time counts. A dense model runs on all cores, by the clock.
"""

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ...kernels.arrays import Float64s
from ...kernels.least_squares import solve_nonnegative
from ...layout import RowLayout
from ...models import DLRM
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...store import Store, open_store
from ..dense import dlrm_work
from ..host import TRAINING_FLOPS, Processor, SoftwareCosts
from .machine import torch_threads
from .page_cache import drop, warm

ROWS, IDS, PASSES = 200_000, 4096, 10
"""Of a lab with all the time that it wants."""
_NARROW, _WIDE = 16, 128
_ROW_EXTRA_BYTES, _STAGING_BYTES, _SLACK = 60, 512 << 10, 1.2
"""Of a budget: what a cached row takes beside itself, what a store takes at least, and an eighth for transactions."""
_CHUNK: Final = 100_000
_BATCHES: Final = 8
_MISS_PART: Final = 8
"""The cache holds one row of so many where batches miss."""
_WRITTEN_BEFORE, _WRITTEN = 1 / 4, 1 / 2
"""Of the rows: so few that no room has to be won back."""
_DENSE_TABLES, _DENSE_DIM, _DENSE_SAMPLES = 8, 16, 64
_DENSE: Final[dict[str, Any]] = {
    "num_dense": 13, "bottom_mlp": (32,), "top_mlp": (32,), "interaction": "dot", "cross_layers": 1, "cross_rank": 0,
}  # fmt: skip
"""Next to no work a product."""


class Lab(NamedTuple):
    """How much is done, and where."""

    folder: Path
    processor: Processor
    rows: int
    ids: int
    cold_ids: int
    passes: int


class _Loop(NamedTuple):
    """A batch of a loop: its nanoseconds, and how many of them costs explain."""

    ns: float
    explained: Callable[[SoftwareCosts], float]


def measure_costs(lab: Lab, progress: Callable[[float], None] = lambda _share: None) -> SoftwareCosts:
    """Time all loops, on stores that are made in the lab's folder."""
    costs = SoftwareCosts()
    with torch_threads(1):
        for number, (names, loops) in enumerate(_LOOPS.items(), 1):
            costs = replace(costs, **_solved(names, [loop(lab) for loop in loops], costs))
            progress(number / len(_LOOPS))
    return costs


def _solved(names: Sequence[str], loops: Sequence[_Loop], costs: SoftwareCosts) -> dict[str, float]:
    """The costs of these names that explain what others leave of the loops; relative errors count."""
    nothing, ones = SoftwareCosts(), [SoftwareCosts(**{name: 1.0}) for name in names]
    work = [[(loop.explained(one) - loop.explained(nothing)) / loop.ns for one in ones] for loop in loops]
    left = [max(0.0, 1 - loop.explained(costs) / loop.ns) for loop in loops]
    return dict(zip(names, solve_nonnegative(np.array(work), np.array(left)).tolist(), strict=True))


# Stores


class _Subject(NamedTuple):
    """An open store of one table, and the module over it."""

    store: Store
    module: TieredEmbeddingBagCollection
    layout: RowLayout
    generator: np.random.Generator

    @property
    def file(self) -> Path:
        return self.store.directory / ROW_FILE_NAME

    def batches(self, number: int, ids: int) -> list[KeyedJaggedTensor]:
        """Of any rows, one id a bag."""
        drawn = self.generator.integers(0, self.store["t0"].config.num_embeddings, (number, ids))
        return [KeyedJaggedTensor(["f0"], torch.from_numpy(each), offsets=torch.arange(ids + 1)) for each in drawn]

    def look_up(self, batch: KeyedJaggedTensor) -> None:
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

    def timed(
        self,
        batches: list[KeyedJaggedTensor],
        *,
        is_training: bool = False,
        is_cold: bool = False,
        clock: Callable[[], float] = time.thread_time,
        middle: Callable[[Sequence[float]], float] = statistics.median,
    ) -> _Loop:
        """``is_cold``: pages come from the device, else from the system's page cache."""
        work, taken, before = self.train if is_training else self.look_up, list[float](), self.done()
        for batch in batches:
            if is_cold:
                drop(self.file)
            began = clock()
            work(batch)
            taken.append(clock() - began)
        read, pages, written, transactions = ((self.done() - before) / len(batches)).tolist()
        rows = statistics.fmean(len(np.unique(batch.values().numpy())) for batch in batches)
        ids = float(batches[0].values().numel())
        amounts: dict[str, Any] = {"ids": ids, "rows": rows, "bags": ids, "layout": self.layout}
        ddr = self.store.stats().ddr

        def explained(costs: SoftwareCosts) -> float:
            ns = 1e3 * costs.batch_us * (TRAINING_FLOPS if is_training else 1) + costs.lookup_ns(**amounts)
            ns += costs.update_ns(**amounts) if is_training else 0.0
            if ddr.capacity_rows < self.store["t0"].config.num_embeddings:
                ns += costs.admission_ns(ids=ids, rows=rows) + read * costs.miss_row_ns(self.layout)
            ns += pages * costs.read_ns if is_cold else 0.0
            ns += written * costs.append_row_ns(self.layout) + 1e3 * transactions * costs.transaction_us
            return float(ns)

        return _Loop(1e9 * middle(taken), explained)


@contextlib.contextmanager
def _opened(lab: Lab, dim: int, cached_rows: float) -> Iterator[_Subject]:
    """A store of rows that were all written, with a cache of about so many; as it was made."""
    path, layout = lab.folder / f"store-{dim}", RowLayout(dim=dim, state_dim=1)
    if not path.exists():
        _fill(path, dim, lab.rows)
    ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _ROW_EXTRA_BYTES) * _SLACK)
    warm(path / ROW_FILE_NAME)
    with open_store(path, mode="w", ddr=ddr, threads=1) as store:
        yield _Subject(store, TieredEmbeddingBagCollection(store), layout, np.random.default_rng(1))
        store.rollback(store.version)


def _fill(path: Path, dim: int, rows: int) -> None:
    config = TableConfig(
        name="t0", num_embeddings=rows, embedding_dim=dim, feature_names=("f0",), pooling="sum",
        optimizer=optim.RowWiseAdagrad(lr=0.01),
    )  # fmt: skip
    with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
        table = store.create_table(config)
        for ids in torch.split(torch.arange(rows), _CHUNK):
            table.write(ids, torch.full((len(ids), dim), 0.01))
        store.commit()


def transactions_in(path: Path) -> int:
    """That were ever made in a store's file, by the newer of its two meta pages."""
    with path.open("rb", buffering=0) as file:
        first = parse_meta(os.pread(file.fileno(), META_READ_BYTES, 0))
        assert not isinstance(first, str), first
        second = parse_meta(os.pread(file.fileno(), META_READ_BYTES, first.page_bytes))
        assert not isinstance(second, str), second
    return max(first.txn_id, second.txn_id)


# Loops


def _in_memory(lab: Lab, *, dim: int, ids: int, is_training: bool) -> _Loop:
    """All rows cached."""
    with _opened(lab, dim, 2 * lab.rows) as subject:
        for rows in torch.split(torch.arange(lab.rows), _CHUNK):
            subject.store["t0"].read(rows)
        batches = subject.batches(_BATCHES, min(ids, lab.ids))
        subject.timed(batches, is_training=is_training)
        return subject.timed(batches * lab.passes, is_training=is_training)


def _misses(lab: Lab, *, is_cold: bool) -> _Loop:
    """Lookups of rows that are not cached; pages from the device in batches that a slow one reads in time."""
    with _opened(lab, _WIDE, lab.rows / _MISS_PART) as subject:
        # Slots are filled in order at first, and rows leave in it: not so when most rows have left.
        while (ddr := subject.store.stats().ddr).evictions < ddr.capacity_rows:
            subject.look_up(*subject.batches(1, lab.ids))
        return subject.timed(subject.batches(_BATCHES, lab.cold_ids if is_cold else lab.ids), is_cold=is_cold)


def _writes(lab: Lab, *, dim: int, part: int) -> _Loop:
    """Training steps that evict as many dirty rows as they fetch. The cache holds one row of ``part``, which decides
    how many rows a transaction has."""
    count = max(8, min(lab.ids, lab.rows // part) // 2)
    with _opened(lab, dim, lab.rows // part) as subject:
        while subject.store.stats().ssd.rows_written < _WRITTEN_BEFORE * lab.rows:
            subject.train(*subject.batches(1, count))
        batches = subject.batches(max(1, int(_WRITTEN * lab.rows) // count), count)
        return subject.timed(batches, is_training=True, clock=time.process_time, middle=statistics.fmean)


def _dense(lab: Lab) -> _Loop:
    """Training steps of a small dense model on all cores. The fastest, as others take of the cores what they take;
    rows are given and their gradient is taken."""
    model = DLRM(nn.Identity(), num_features=_DENSE_TABLES, embedding_dim=_DENSE_DIM, **_DENSE)
    rule, labels = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(_DENSE_SAMPLES)
    dense = torch.rand(_DENSE_SAMPLES, _DENSE["num_dense"])
    pooled = torch.rand(_DENSE_SAMPLES, _DENSE_TABLES * _DENSE_DIM, requires_grad=True)

    def step() -> float:
        began = time.perf_counter()
        rule.zero_grad()
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model.dense_part(dense, pooled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None
        return 1e9 * (time.perf_counter() - began)

    work, cores = dlrm_work([_DENSE_DIM] * _DENSE_TABLES, **_DENSE), lab.processor.cores
    flops_ns = 1e9 * TRAINING_FLOPS * _DENSE_SAMPLES * work.dense_flops / lab.processor.flops
    with torch_threads(cores):
        fastest = min(step() for _ in range(3 + 3 * lab.passes))
    of_all = functools.partial(SoftwareCosts.dense_ns, dense=work, samples=_DENSE_SAMPLES, threads=cores)
    return _Loop(fastest, lambda costs: flops_ns + sum(of_all(costs, is_training=True)))


_LOOPS: Final[Mapping[tuple[str, ...], Sequence[Callable[[Lab], _Loop]]]] = {
    ("batch_us",): [functools.partial(_in_memory, dim=_WIDE, ids=1, is_training=True)],
    ("byte_ns",): [functools.partial(_in_memory, dim=_WIDE, ids=IDS, is_training=False)],
    ("id_ns",): [functools.partial(_in_memory, dim=_NARROW, ids=IDS, is_training=True)],
    ("miss_ns",): [functools.partial(_misses, is_cold=False)],
    ("read_ns",): [functools.partial(_misses, is_cold=True)],
    ("append_ns", "append_ns_per_byte", "transaction_us"): [
        functools.partial(_writes, dim=dim, part=part) for dim, part in ((_NARROW, 8), (_NARROW, 64), (_WIDE, 8))
    ],
    ("wake_us",): [_dense],
}
"""In the order in which they are timed; each finds the costs of its key."""
