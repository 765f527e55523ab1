"""How sharp the minimum is that a run of the trainer ended in."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..models import Towers, box_sharpness, hessian_eigenvalues
from ..nn.collection import TieredEmbeddingBagCollection
from ..store import open_store
from .build import build_model, open_data
from .checkpoint import load_model, saved_config

_BATCH: Final = 2048


class Sharpness(NamedTuple):
    """Of the mean loss over ``rows`` training rows, at the dense weights of a store's ``version``: ``box_sharpness``
    by epsilon, of all weights or in a random subspace of 100 dimensions; and the largest eigenvalue of the Hessian."""

    version: int
    rows: int
    whole_1e3_percent: float
    whole_5e4_percent: float
    subspace_1e3_percent: float
    largest_eigenvalue: float
    commit_id: str = ""


def sharpness_of(folder: str | Path, *, rows: int = 8192) -> Sharpness:
    """Of a run's last commit, on its first ``rows`` training rows, at most ``data.train_rows`` (Keskar et al., "On
    large-batch training for deep learning: generalization gap and sharp minima", ICLR 2017). Rows of tables are
    constants; NaN where the loss is no number. The store is only read. Memory: some 1,000 bytes for each dense weight.

    Raises:
        ValueError: ``folder`` is no store of ``tierstore train``, or its data are not there or have fewer rows.
        StoreNotFoundError, DamagedError.
    """
    with torch.no_grad(), torch.random.fork_rng([]), open_store(folder, mode="r", ddr="256MiB") as store:
        config, version = saved_config(store.extra, str(folder)), store.version
        if config is None or rows < 1:
            raise ValueError(f"{folder}, rows={rows}: give the store of a run of tierstore train, and 1 row or more")
        embeddings = TieredEmbeddingBagCollection(store, tables=list(config.data.sparse_columns))
        model = build_model(config, embeddings).eval()
        load_model(model, store.tensors())
        (reader, hasher), stop = open_data(config), min(rows, config.data.train_rows or rows)
        batches = reader.batches(hasher, batch_size=_BATCH, stop_row=stop, log_dense=config.data.log_dense)
        parts = [(batch.dense, embeddings(batch.sparse).values(), batch.labels) for batch in batches]

    def losses() -> Iterator[Tensor]:
        for dense, pooled, labels in parts:
            towers = model.embeddings
            logits = model.dense_part(dense, towers.compressed(pooled) if isinstance(towers, Towers) else pooled)
            yield binary_cross_entropy_with_logits(logits, labels, reduction="sum") / stop

    if not math.isfinite(sum(float(loss.detach()) for loss in losses())):
        return Sharpness._make([version, stop, *[math.nan] * 4, store.commit_id(version)])
    weights, boxes = list(model.dense_parameters().values()), ((1e-3, None), (5e-4, None), (1e-3, 100))
    percents = [box_sharpness(losses, weights, epsilon=epsilon, dims=dims) for epsilon, dims in boxes]
    largest = hessian_eigenvalues(losses, weights, iterations=50, tolerance=1e-3).largest
    return Sharpness._make([version, stop, *percents, largest, store.commit_id(version)])
