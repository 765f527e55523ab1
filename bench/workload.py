"""Ids and stores that several benchmarks share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tierstore

CHUNK: Final = 200_000
"""Rows read or written at a time."""


def ids_of(generator: np.random.Generator, rows: int, count: int, exponent: float) -> NDArray[np.int64]:
    """Ids of ``rows`` rows whose frequencies follow Zipf's law with the given exponent; 0 for uniform. Which rows are
    the frequent ones is random, but the same for every generator."""
    if not exponent:
        return generator.integers(0, rows, count)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    cumulated = np.cumsum(weights)
    ranks = np.searchsorted(cumulated, generator.random(count) * cumulated[-1])
    scattered = np.random.default_rng(rows).permutation(rows)
    found: NDArray[np.int64] = scattered[np.minimum(ranks, rows - 1)]
    return found


class Batches:
    """Batches of bags of one size for some tables of one size: ``values``, int64 [tables * batch * pooling_factor] of
    each batch, table by table, and ``offsets``, int64 [tables * batch + 1]."""

    def __init__(
        self, *, tables: int, rows: int, batch: int, pooling_factor: int, exponent: float, count: int, seed: int
    ) -> None:
        generator = np.random.default_rng(seed)
        total = batch * pooling_factor
        drawn = [ids_of(generator, rows, count * total, exponent).reshape(count, total) for _ in range(tables)]
        self.values = [torch.from_numpy(np.concatenate([each[i] for each in drawn])) for i in range(count)]
        self.offsets = torch.arange(0, tables * total + 1, pooling_factor)
        self.tables, self.batch, self.count = tables, batch, count
        self.lookups = tables * total

    def of_table(self, index: int, table: int) -> tuple[Tensor, Tensor]:
        """(ids, offsets without the last) of one table in a batch, as ``torch.nn.EmbeddingBag`` takes them."""
        size = self.lookups // self.tables
        return self.values[index][table * size : (table + 1) * size], self.offsets[: self.batch]

    def jagged(self, index: int) -> tierstore.KeyedJaggedTensor:
        """A batch, of features f0, f1, ..."""
        names = [f"f{table}" for table in range(self.tables)]
        return tierstore.KeyedJaggedTensor(names, self.values[index], offsets=self.offsets)

    def unique(self, index: int) -> int:
        """Distinct rows in a batch."""
        return sum(len(np.unique(self.of_table(index, table)[0].numpy())) for table in range(self.tables))


def chunks(table: tierstore.Table) -> Sequence[Tensor]:
    """The ids of all rows, some at a time."""
    return torch.split(torch.arange(table.config.num_embeddings), CHUNK)


def make_store(
    path: Path | None,
    *,
    rows: int | Sequence[int],
    dim: int,
    optimizer: Any,
    ddr: str | int,
    tables: int = 1,
    value: float | None = None,
    **settings: Any,
) -> tierstore.Store:
    """A new store of tables t0, t1, ... with a feature f0, f1, ... and so many rows each. ``value`` is written to every
    row and committed, so that each has to be read, where else it would be computed."""
    store, init = tierstore.open(path, mode="w", ddr=ddr, **settings), tierstore.init.Uniform(-0.05, 0.05, seed=1)
    for number, count in enumerate([rows] * tables if isinstance(rows, int) else rows):
        store.create_table(
            tierstore.TableConfig(
                name=f"t{number}", num_embeddings=count, embedding_dim=dim, feature_names=(f"f{number}",),
                pooling="sum", init=init, optimizer=optimizer,
            )
        )  # fmt: skip
    if value is not None:
        for table in store.tables.values():
            for ids in chunks(table):
                table.write(ids, torch.full((len(ids), dim), value))
        store.commit()
    return store


def read_every_row(table: tierstore.Table) -> None:
    """So that all are in memory, as far as they fit."""
    for ids in chunks(table):
        table.read(ids)
