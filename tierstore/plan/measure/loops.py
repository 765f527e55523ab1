"""tierstore's own work: small stores, and a loop for each cost, chosen so that the cost takes much of it.

Loops over stores are on one core, in the process's own time, so neither other processes nor waits for a device are in
them. A dense model runs on all cores, by the clock.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import set_torch_threads

from ... import optim
from ...config import TableConfig
from ...io.btree import parse_meta
from ...io.files import ROW_FILE_NAME
from ...io.superblock import read_metas
from ...kernels.arrays import Float64s
from ...kernels.least_squares import solve_nonnegative
from ...layout import RowLayout
from ...models import DLRM
from ...nn.collection import TieredEmbeddingBagCollection
from ...nn.jagged import KeyedJaggedTensor
from ...store import Store, open_store
from ...system.page_cache import drop, warm
from ..dense import dlrm_work
from ..host import TRAINING_FLOPS, Processor, SoftwareCosts

ROWS, IDS, PASSES = 200_000, 4096, 10
"""Of a lab with all the time that it wants."""
_NARROW, _WIDE = 16, 128
_ROW_EXTRA_BYTES, _STAGING_BYTES, _SLACK = 60, 512 << 10, 1.2
"""Of a budget: what a cached row takes besides itself, what a store takes at least, and an eighth for transactions."""
_CHUNK, _BATCHES, _MISS_PART = 100_000, 8, 8  # where batches miss, the cache holds one row in _MISS_PART
_WRITTEN_BEFORE, _WRITTEN = 1 / 4, 1 / 2  # of the rows: so few that no space has to be won back
_DENSE_TABLES, _DENSE_DIM, _DENSE_SAMPLES = 8, 64, (64, 2048)
_DENSE: Final[dict[str, Any]] = {
    "num_dense": 13, "bottom_mlp": (64,), "top_mlp": (64,), "interaction": "dot", "cross_layers": 1, "cross_rank": 0,
}  # fmt: skip


class Lab(NamedTuple):
    """How much is done, and where."""

    folder: Path
    processor: Processor
    rows: int
    ids: int
    cold_ids: int
    passes: int


class _Loop(NamedTuple):
    """Nanoseconds of a batch, and how many of them costs explain."""

    ns: float
    explained: Callable[[SoftwareCosts], float]


def measure_costs(lab: Lab) -> SoftwareCosts:
    """Of all loops, on stores in the lab's folder; what the costs before explain is taken off."""
    costs, nothing = SoftwareCosts(), SoftwareCosts()
    for names, makers in _LOOPS.items():
        with set_torch_threads(1):
            loops = [make(lab) for make in makers]
        ones = [SoftwareCosts(**{name: 1.0}) for name in names]
        work = [[(loop.explained(one) - loop.explained(nothing)) / loop.ns for one in ones] for loop in loops]
        left = [max(0.0, 1 - loop.explained(costs) / loop.ns) for loop in loops]
        found = solve_nonnegative(np.array(work), np.array(left)).tolist()  # relative errors count
        costs = replace(costs, **dict(zip(names, found, strict=True)))
    return costs


class _Subject(NamedTuple):
    """An open store of one table, its file, and the module over it."""

    store: Store
    file: Path
    module: TieredEmbeddingBagCollection
    layout: RowLayout
    generator: np.random.Generator

    def batches(self, number: int, ids: int) -> list[KeyedJaggedTensor]:
        """Of any rows, one id a bag."""
        drawn = self.generator.integers(0, self.store["t0"].config.num_embeddings, (number, ids))
        return [KeyedJaggedTensor(["f0"], torch.from_numpy(each), offsets=torch.arange(ids + 1)) for each in drawn]

    def run(self, batch: KeyedJaggedTensor, *, is_training: bool) -> None:
        with torch.set_grad_enabled(is_training):
            pooled: Tensor = self.module(batch).values()
        if is_training:
            pooled.backward(torch.full_like(pooled, 1e-3))  # type: ignore[no-untyped-call]

    def done(self) -> Float64s:
        """Rows read from SSD, pages read for them, rows written, and transactions."""
        ssd, page_bytes = self.store.stats().ssd, self.layout.page_bytes
        transactions = transactions_in(self.file, page_bytes)
        return np.array([ssd.lookups, ssd.bytes_read / page_bytes, ssd.rows_written, transactions], np.float64)

    def timed(
        self,
        batches: list[KeyedJaggedTensor],
        *,
        is_training: bool = False,
        is_cold: bool = False,
        middle: Callable[[Sequence[float]], float] = statistics.median,
    ) -> _Loop:
        """``is_cold``: pages come from the device, else from the system's page cache."""
        taken, before = list[float](), self.done()
        for batch in batches:
            if is_cold:
                drop(self.file)
            began = time.process_time()
            self.run(batch, is_training=is_training)
            taken.append(time.process_time() - began)
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
        config = TableConfig(
            name="t0", num_embeddings=lab.rows, embedding_dim=dim, feature_names=("f0",), pooling="sum",
            optimizer=optim.RowWiseAdagrad(lr=0.01),
        )  # fmt: skip
        with open_store(path, mode="w", ddr="256MiB", threads=1) as store:
            table = store.create_table(config)
            for ids in torch.split(torch.arange(lab.rows), _CHUNK):
                table.write(ids, torch.full((len(ids), dim), 0.01))
            store.commit()
    warm(path / ROW_FILE_NAME)
    ddr = _STAGING_BYTES + int(int(cached_rows) * (layout.row_bytes + _ROW_EXTRA_BYTES) * _SLACK)
    with open_store(path, mode="w", ddr=ddr, threads=1) as store:
        module, generator = TieredEmbeddingBagCollection(store), np.random.default_rng(1)
        yield _Subject(store, path / ROW_FILE_NAME, module, layout, generator)
        store.rollback(store.version)


def transactions_in(path: Path, page_bytes: int) -> int:
    """Ever made in a store's file, by the newer of its two meta pages."""
    return max(meta.txn_id for meta in map(parse_meta, read_metas(path, page_bytes)) if not isinstance(meta, str))


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
            subject.run(*subject.batches(1, lab.ids), is_training=False)
        amount = (_BATCHES, lab.cold_ids) if is_cold else (_BATCHES * lab.passes, lab.ids)
        return subject.timed(subject.batches(*amount), is_cold=is_cold)


def _writes(lab: Lab, *, dim: int, part: int) -> _Loop:
    """Training steps that evict as many dirty rows as they fetch. The cache holds one row of ``part``, which decides
    how many rows a transaction has."""
    count = max(8, min(lab.ids, lab.rows // part) // 2)
    with _opened(lab, dim, lab.rows // part) as subject:
        while subject.store.stats().ssd.rows_written < _WRITTEN_BEFORE * lab.rows:
            subject.run(*subject.batches(1, count), is_training=True)
        batches = subject.batches(max(1, int(_WRITTEN * lab.rows) // count), count)
        return subject.timed(batches, is_training=True, middle=statistics.fmean)


def _dense(lab: Lab, *, samples: int) -> _Loop:
    """Training steps of a small dense model on all cores: the fastest, as other processes use the cores too."""
    model = DLRM(nn.Identity(), num_features=_DENSE_TABLES, embedding_dim=_DENSE_DIM, **_DENSE)
    rule, dense = torch.optim.SGD(model.parameters(), lr=0.01), torch.rand(samples, _DENSE["num_dense"])
    pooled = torch.rand(samples, _DENSE_TABLES * _DENSE_DIM, requires_grad=True)

    def step() -> float:
        began = time.perf_counter()
        rule.zero_grad()
        model.dense_part(dense, pooled).sum().backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None
        return 1e9 * (time.perf_counter() - began)

    dense_work, cores = dlrm_work([_DENSE_DIM] * _DENSE_TABLES, **_DENSE), lab.processor.cores
    flops_ns = 1e9 * TRAINING_FLOPS * samples * dense_work.dense_flops / lab.processor.flops
    amounts: dict[str, Any] = {"samples": samples, "threads": cores, "is_training": True}
    with set_torch_threads(cores):
        fastest = min(step() for _ in range(3 + 3 * lab.passes))
    return _Loop(fastest, lambda costs: flops_ns + sum(costs.dense_ns(dense_work, **amounts)))


_LOOPS: Final[Mapping[tuple[str, ...], Sequence[Callable[[Lab], _Loop]]]] = {
    ("batch_us",): [functools.partial(_in_memory, dim=_WIDE, ids=1, is_training=True)],
    ("byte_ns", "id_ns"): [
        functools.partial(_in_memory, dim=dim, ids=IDS, is_training=is_training)
        for dim, is_training in ((_WIDE, False), (_WIDE, True), (_NARROW, True))
    ],
    ("miss_ns",): [functools.partial(_misses, is_cold=False)],
    ("read_ns",): [functools.partial(_misses, is_cold=True)],
    ("append_ns", "append_ns_per_byte", "transaction_us"): [
        functools.partial(_writes, dim=dim, part=part) for dim, part in ((_NARROW, 8), (_NARROW, 64), (_WIDE, 8))
    ],
    ("wake_us", "value_ns"): [functools.partial(_dense, samples=samples) for samples in _DENSE_SAMPLES],
}
"""In the order in which they are timed; each finds the costs of its key."""
