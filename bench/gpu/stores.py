"""Stores of many tables whose rows are divided among the tiers, a model over them, and steps of training."""

import hashlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tierstore.hbm import pool, streams
from tierstore.hbm.streams import Mark, Streams
from tierstore.layout import KEY_ROW_BITS, RowLayout
from tierstore.models import DLRM
from tierstore.store.pools import hbm_bytes_of

from .ids import Zipf
from .rig import Rig

__all__ = [
    "Batch",
    "Steps",
    "Trainer",
    "WaitStreams",
    "draw_batches",
    "fill_host_memory",
    "hbm_bytes",
    "make_tables",
    "open_fresh",
    "table_name",
]

_NUM_DENSE: Final = 13
_LR: Final = 0.01
_WARM_UPS: Final = 3
_FILL_ROWS: Final = 100_000


class Batch(NamedTuple):
    """One batch of training; ids on the host, the rest on the device."""

    dense: Tensor
    labels: Tensor
    sparse: tierstore.KeyedJaggedTensor


def table_name(number: int) -> str:
    return f"t{number}"


def hbm_bytes(rows: float, row_bytes: int) -> int:
    """A budget of device memory that has so many cached rows beside their overflow slots."""
    return hbm_bytes_of(RowLayout(dim=row_bytes // 4), math.ceil(rows))


def open_fresh(folder: Path, **settings: Any) -> tierstore.Store:
    """A new store there, whatever there was."""
    shutil.rmtree(folder, ignore_errors=True)
    return tierstore.open(folder, **settings)


def make_tables(store: tierstore.Store, sizes: Sequence[int], dim: int, optimizer: tierstore.optim.Optimizer) -> int:
    """Create the tables; bytes of a row in memory."""
    for number, rows in enumerate(sizes):
        store.create_table(
            tierstore.TableConfig(
                name=table_name(number),
                num_embeddings=rows,
                embedding_dim=dim,
                optimizer=optimizer,
                init=tierstore.init.Uniform(-0.05, 0.05, seed=number),
            )
        )
    return store[table_name(0)].layout.row_bytes


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
    names = [table_name(number) for number in range(len(sizes))]
    offsets = torch.arange(len(sizes) * batch + 1)
    made = []
    for _ in range(count):
        ids = torch.cat([zipf.draw(batch) for zipf in zipfs]).cpu()
        dense = torch.rand((batch, _NUM_DENSE), generator=rig.generator, device=rig.device)
        labels = torch.randint(2, (batch,), generator=rig.generator, device=rig.device).float()
        made.append(Batch(dense, labels, tierstore.KeyedJaggedTensor(names, ids, offsets=offsets)))
    return made


class WaitStreams(Streams):
    """Streams that can tell for how long a model's stream stood still for rows that were not there yet."""

    def __init__(self, inner: Streams, rig: Rig) -> None:
        self.pin_memory = inner.pin_memory
        self.recording = False
        self._inner = inner
        self._rig = rig
        self._inside = threading.local()
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def _side(self) -> Iterator[None]:
        depth = getattr(self._inside, "depth", 0)
        self._inside.depth = depth + 1
        try:
            with self._inner.side():
                yield
        finally:
            self._inside.depth = depth

    def side(self) -> AbstractContextManager[Any]:
        return self._side()

    def mark(self) -> Mark:
        return self._inner.mark()

    def follow(self, mark: Mark) -> None:
        timed = self.recording and self._rig.is_cuda and not getattr(self._inside, "depth", 0)
        events = [self._rig.event(), self._rig.event()] if timed else []
        if timed:
            events[0].record()
        self._inner.follow(mark)
        if timed:
            events[1].record()
            self._waits.append((events[0], events[1]))

    def waited_seconds(self) -> float:
        """Sum of the waits that were recorded, and forget them; the device must be done with them."""
        waits, self._waits = self._waits, []
        return sum(float(begin.elapsed_time(end)) for begin, end in waits) / 1e3


class Steps:
    """A DLRM around embeddings, and steps of its training.

    Args:
        embeddings: given the ids of a ``Batch``, something with ``values()``, [B, tables * dim].
        config: "dim", "bottom_mlp", "top_mlp".
    """

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
        self._rig.wait()
        start = time.perf_counter()
        for batch in self._ahead(batches):
            self.step(batch)
        self._rig.wait()
        return time.perf_counter() - start

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
        for batch in batches[:3]:
            self._learn(self.model.dense_part(batch.dense, pooled), batch)
        self._rig.wait()
        start = time.perf_counter()
        for batch in batches:
            self._learn(self.model.dense_part(batch.dense, pooled), batch)
        self._rig.wait()
        return time.perf_counter() - start


class Trainer(Steps):
    """A DLRM over all tables of a store.

    Args:
        depth: batches prefetched.
    """

    def __init__(self, rig: Rig, store: tierstore.Store, config: dict[str, Any], *, depth: int) -> None:
        self.store = store
        self._watched_streams: list[WaitStreams] = []
        self._depth = depth
        self.collection = tierstore.TieredEmbeddingBagCollection(store)
        super().__init__(rig, self.collection, len(store.tables), config)
        with mock.patch.object(pool, "open_streams", self._watched(streams.open_streams)):
            # Pools are made when they are first asked for.
            assert store[table_name(0)].pool.tier.on_device, "the store has no rows in device memory"

    def _watched(self, open_streams: Callable[[torch.device], Streams]) -> Callable[[torch.device], Streams]:
        def opened(device: torch.device) -> Streams:
            self._watched_streams.append(WaitStreams(open_streams(device), self._rig))
            return self._watched_streams[-1]

        return opened

    def _ahead(self, batches: Sequence[Batch]) -> Iterable[Batch]:
        return tierstore.prefetch(batches, self.collection, depth=self._depth, features=lambda batch: batch.sparse)

    def waited_share(self, batches: Sequence[Batch]) -> float:
        """Train on the batches; the share of the time for which the model's stream stood still for rows."""
        for each in self._watched_streams:
            each.recording = True
        seconds = self.take_steps(batches)
        for each in self._watched_streams:
            each.recording = False
        return sum(each.waited_seconds() for each in self._watched_streams) / seconds

    def digest(self, batches: Sequence[Batch]) -> str:
        """SHA-256 of the dense weights and of every row that the batches name."""
        state = hashlib.sha256()
        for parameter in self.model.parameters():
            state.update(parameter.detach().cpu().numpy().tobytes())
        ids = torch.stack([batch.sparse.values() for batch in batches])
        for number, own in enumerate(ids.chunk(len(self.store.tables), dim=1)):
            rows = self.store[table_name(number)].read(torch.unique(own))
            state.update(rows.cpu().numpy().tobytes())
        return state.hexdigest()
