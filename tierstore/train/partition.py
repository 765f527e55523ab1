"""Towers for a run's tables, from the vectors that it trained."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..dist.placement.towers import TowerPlan, partition, similarity_of
from ..nn.collection import TieredEmbeddingBagCollection
from ..store import open_store
from .build import open_data
from .config import RunConfig
from .readers import DataError


@torch.no_grad()
def partition_run(config: RunConfig, count: int, *, rows: int = 10_000, seed: int = 0) -> TowerPlan:
    """``partition`` of a run's tables by what its store's last commit holds and its first ``rows`` training rows look
    up. Loads are lookups, and bytes of rows with optimizer state. Changes nothing.

    Raises:
        ValueError: there are fewer tables than towers, or no rows. StoreNotFoundError, TableError: it is not trained.
    """
    columns, (reader, hasher) = list(config.data.sparse_columns), open_data(config)
    lookups, size, stop = np.zeros(len(columns)), config.train.batch_size, min(rows, config.data.train_rows or rows)
    with open_store(config.store.path, mode="r", ddr=config.store.ddr) as store:
        embeddings = TieredEmbeddingBagCollection(store, tables=columns)

        def vectors() -> Iterator[Tensor]:
            for batch in reader.batches(hasher, batch_size=size, stop_row=stop):
                lookups[:] += batch.sparse.lengths().view(len(columns), -1).sum(dim=1).numpy()
                yield embeddings(batch.sparse).values().view(len(batch), len(columns), -1)

        similarity = similarity_of(vectors(), columns)
        bytes_each = [table.layout.row_bytes * table.config.num_embeddings for table in embeddings.tables]
    if not lookups.any():
        raise DataError(f"{reader.path}: its first {stop:,} rows look up nothing to compare tables by; read more")
    return partition(columns, similarity, np.stack([lookups, bytes_each], axis=1), count, seed=seed)
