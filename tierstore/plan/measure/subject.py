"""A small store of alike tables that loops are timed on, and how they are timed: in this thread's processor time."""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ... import optim
from ...config import TableConfig
from ...io.btree import META_READ_BYTES, parse_meta
from ...kernels.arrays import Int64s
from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...rows import RowLayout
from ...store import Store, open_store

__all__ = [
    "CHUNK",
    "ROWS_FILE",
    "Draw",
    "Subject",
    "drawn",
    "fill",
    "jagged",
    "median_ns",
    "opened",
    "thread_ns",
    "transactions_in",
]

_BOOKS_BYTES: Final = 60
"""A cached row takes about so much beside itself."""
_SLACK: Final = 1.2
"""Of the budget an eighth is for transactions."""
_STAGING_BYTES: Final = 512 << 10
ROWS_FILE: Final = "rows.lmdb"
CHUNK: Final = 100_000


class Draw(Protocol):
    def __call__(self, count: int, pooling_factor: int = 1) -> KeyedJaggedTensor:
        """The next batch: so many ids, in bags of ``pooling_factor``."""


class Subject(NamedTuple):
    """A store that is open, and the module over its tables."""

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
        columns = len(self.store.tables) * self.layout.dim
        return functools.partial(self.train, gradient=torch.full((batch.stride(), columns), 1e-3))

    @property
    def name(self) -> str:
        return f"rows of {self.layout.row_bytes} bytes"


def fill(path: Path, dim: int, rows: int, *, tables: int = 1) -> None:
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
            for first in range(0, rows, CHUNK):
                ids = torch.arange(first, min(first + CHUNK, rows))
                table.write(ids, torch.full((len(ids), dim), 0.01))
        store.commit()


@contextmanager
def opened(path: Path, dim: int, cached_rows: int) -> Iterator[Subject]:
    """With a cache of about so many rows."""
    layout = RowLayout(dim=dim, state_dim=1)
    ddr = _STAGING_BYTES + int(cached_rows * (layout.row_bytes + _BOOKS_BYTES) * _SLACK)
    with open_store(path, mode="w", ddr=ddr, threads=1) as store:
        yield Subject(store, TieredEmbeddingBagCollection(store), store["t0"].layout)


def jagged(ids: Int64s, pooling_factor: int, *, tables: int = 1) -> KeyedJaggedTensor:
    """Bags of so many ids, an equal part of them for each table, whose ids lie together."""
    offsets = torch.arange(0, len(ids) + 1, pooling_factor)
    return KeyedJaggedTensor([f"f{number}" for number in range(tables)], torch.from_numpy(ids), offsets=offsets)


def drawn(rows: int) -> Draw:
    """Batches of any rows, each as likely."""
    generator = np.random.default_rng(1)
    return lambda count, pooling_factor=1: jagged(generator.integers(0, rows, size=(count,)), pooling_factor)


def transactions_in(path: Path) -> int:
    """That were ever made in the file, by the newer of its two meta pages."""
    with (path / ROWS_FILE).open("rb", buffering=0) as file:
        first = parse_meta(os.pread(file.fileno(), META_READ_BYTES, 0))
        assert not isinstance(first, str), first
        second = parse_meta(os.pread(file.fileno(), META_READ_BYTES, first.page_bytes))
        assert not isinstance(second, str), second
    return max(first.txn_id, second.txn_id)


def thread_ns(work: Callable[[KeyedJaggedTensor], None], batch: KeyedJaggedTensor) -> float:
    """Of this thread, on a processor."""
    began = time.thread_time()
    work(batch)
    return 1e9 * (time.thread_time() - began)


def median_ns(work: Callable[[KeyedJaggedTensor], None], batches: Sequence[KeyedJaggedTensor], passes: int) -> float:
    """Of a batch, after one pass that does not count."""
    for batch in batches:
        work(batch)
    return statistics.median(thread_ns(work, batch) for _ in range(passes) for batch in batches)
