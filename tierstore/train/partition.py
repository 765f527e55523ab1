"""Towers for a run's columns, from the vectors that it trained."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ..dist.placement.towers import TowerPlan, partition, similarity_of
from ..nn import TieredEmbeddingBagCollection
from ..store import open_store
from .build import open_data
from .config import RunConfig
from .readers import DataError

_PAGE_BYTES: Final = 4096


@torch.no_grad()
def partition_run(
    config: RunConfig, count: int, *, rows: int = 10_000, coherent: bool = True, seed: int = 0
) -> TowerPlan:
    """``partition`` of a run's tables by what its store's last commit holds and its first rows look up. A tower's loads
    are lookups, and bytes of rows with optimizer state. Changes nothing.

    Args:
        count: towers.
        rows: of the training data, from the start.
        coherent, seed: as of ``partition``.

    Raises:
        ValueError: there are fewer tables than towers, or no rows. StoreNotFoundError, TableError: the run was not
            trained.
    """
    columns, (reader, hasher) = list(config.data.sparse_columns), open_data(config)
    lookups, shape, batch_size = np.zeros(len(columns)), (len(columns), config.embedding.dim), config.train.batch_size
    stop = min(rows, config.data.train_rows or rows)
    with open_store(config.store.path, mode="r", ddr=config.store.ddr) as store:
        embeddings = TieredEmbeddingBagCollection(store, tables=columns)

        def vectors() -> Iterator[Tensor]:
            for batch in reader.batches(hasher, batch_size=batch_size, stop_row=stop):
                lookups[:] += batch.sparse.lengths().view(len(columns), -1).sum(dim=1).numpy()
                yield torch.unflatten(embeddings(batch.sparse).values(), 1, shape)

        similarity = similarity_of(vectors(), columns)
        sizes = [store[name].config.size_bytes(_PAGE_BYTES) for name in columns]
    if not lookups.any():
        raise DataError(f"{reader.path}: its first {stop:,} rows look up nothing to compare tables by; read more")
    return partition(columns, similarity, np.stack([lookups, sizes], axis=1), count, coherent=coherent, seed=seed)
