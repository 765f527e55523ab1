"""Rows divided among the tiers, a model over the tables of a store, and steps of its training."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tierstore.layout import KEY_ROW_BITS, RowLayout
from tierstore.models import DLRM
from tierstore.store.pools import hbm_bytes_of

from .rig import Rig, Zipf

_NUM_DENSE: Final = 13
_LR: Final = 0.01
_WARM_UPS: Final = 3
_FILL_ROWS: Final = 100_000


class Batch(NamedTuple):
    """One batch of training; ids on the host, the rest on the device."""

    dense: Tensor
    labels: Tensor
    sparse: tierstore.KeyedJaggedTensor


def hbm_bytes(rows: float, row_bytes: int) -> int:
    """A budget of device memory that has so many cached rows beside their overflow slots."""
    return hbm_bytes_of(RowLayout(dim=row_bytes // 4), math.ceil(rows))


def shape_of(config: dict[str, Any]) -> str:
    """Tables, rows and ids, in words."""
    sizes = config["table_sizes"]
    return f"{len(sizes)} tables, {sum(sizes):,} rows of {config['dim']}, Zipf {config['exponent']}"


def fill_host_memory(store: tierstore.Store) -> None:
    """Every row into host memory, past the device's."""
    for table in store.tables.values():
        for start in range(0, table.config.num_embeddings, _FILL_ROWS):
            rows = np.arange(start, min(start + _FILL_ROWS, table.config.num_embeddings))
            for _, lease in table.pool.leases.parts(table.index << KEY_ROW_BITS | rows):
                lease.release()


def draw_batches(rig: Rig, sizes: Sequence[int], exponent: float, batch: int, count: int) -> list[Batch]:
    """One id a feature, Zipf in each table."""
    zipfs = [Zipf(rig, rows, exponent) for rows in sizes]
    names = [f"f{number}" for number in range(len(sizes))]
    offsets = torch.arange(len(sizes) * batch + 1)
    made = []
    for _ in range(count):
        ids = torch.cat([zipf.draw(batch) for zipf in zipfs]).cpu()
        dense = torch.rand((batch, _NUM_DENSE), generator=rig.generator, device=rig.device)
        labels = torch.randint(2, (batch,), generator=rig.generator, device=rig.device).float()
        made.append(Batch(dense, labels, tierstore.KeyedJaggedTensor(names, ids, offsets=offsets)))
    return made


class Steps:
    """A DLRM around embeddings, and steps of its training. Given the ids of a ``Batch``, ``embeddings`` return
    something with ``values()``, [B, tables * dim]."""

    def __init__(self, rig: Rig, embeddings: Any, tables: int, config: dict[str, Any]) -> None:
        self._rig = rig
        self._tables = tables
        torch.manual_seed(rig.seed)
        self.model = DLRM(
            embeddings,
            num_features=tables,
            embedding_dim=config["dim"],
            num_dense=_NUM_DENSE,
            bottom_mlp=config["bottom_mlp"],
            top_mlp=config["top_mlp"],
        ).to(rig.device)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR)

    def _ahead(self, batches: Sequence[Batch]) -> Iterable[Batch]:
        """The batches in turn, prefetched where that is possible."""
        return batches

    def take_steps(self, batches: Sequence[Batch]) -> float:
        """Train on the batches; seconds until the device is done."""

        def steps() -> None:
            for batch in self._ahead(batches):
                self.step(batch)

        return self._rig.seconds(steps)

    def step(self, batch: Batch) -> None:
        """Train on one batch, without prefetching."""
        self._learn(self.model(batch.dense, batch.sparse), batch)

    def _learn(self, logits: Tensor, batch: Batch) -> None:
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def dense_seconds(self, batches: Sequence[Batch], dim: int) -> float:
        """Seconds of as many steps of the dense part alone. It changes the dense weights."""
        pooled = torch.rand((len(batches[0].labels), self._tables * dim), device=self._rig.device)
        pooled.requires_grad_()

        def steps(some: Sequence[Batch]) -> None:
            for batch in some:
                self._learn(self.model.dense_part(batch.dense, pooled), batch)

        steps(batches[:_WARM_UPS])
        return self._rig.seconds(lambda: steps(batches))


class Trainer(Steps):
    """A DLRM over all tables of a store, ``depth`` batches prefetched."""

    def __init__(self, rig: Rig, store: tierstore.Store, config: dict[str, Any], *, depth: int) -> None:
        self.store, self._depth = store, depth
        self.collection = tierstore.TieredEmbeddingBagCollection(store)
        super().__init__(rig, self.collection, len(store.tables), config)

    def _ahead(self, batches: Sequence[Batch]) -> Iterable[Batch]:
        return tierstore.prefetch(batches, self.collection, depth=self._depth, features=lambda batch: batch.sparse)

    def digest(self, batches: Sequence[Batch]) -> str:
        """SHA-256 of the dense weights and of every row that the batches name."""
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().cpu().numpy().tobytes())
        ids = torch.stack([batch.sparse.values() for batch in batches])
        for table, own in zip(self.store.tables.values(), ids.chunk(len(self.store.tables), dim=1), strict=True):
            state.update(table.read(torch.unique(own)).cpu().numpy().tobytes())
        return state.hexdigest()
