"""One pooled lookup in device memory: the twin of ``lookup.Lookup``, with the same results.

The host joins and checks the ids and sends them, with the bags' starts, ahead on the side stream; the device groups
them. Forward and backward run on the caller's current stream. The host waits for the side stream only if the rows were
not brought in ahead.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..hbm.batch import Bags
from ..hbm.grouping import Grouping
from ..hbm.lease import HbmLease, Part
from ..hbm.pool import HbmPool
from ..kernels.arrays import Floats, Int32s, Int64s
from ..optim.configs import adding
from ..pool import Pool
from ..rows import KEY_ROW_BITS
from ..system.signals import shielded
from .joined import Joined, OverJoined
from .lookup import MODES
from .merging import Merged
from .tables import RowGradients, by_table

_WIDE: Final = 4
"""float32 that a thread of a GPU moves at a time, 16 bytes."""


class HbmLookup(OverJoined):
    """See the module's docstring; arguments as for ``lookup.Lookup``."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.wants_zeros = True
        self.joined = joined
        self.mode = mode
        self._mode = MODES[mode]
        self._lease: HbmLease | None = None
        self._pool: HbmPool | None = None
        self._keys: Tensor | None = None
        self._bags: Bags | None = None
        self._grouping: Grouping | None = None
        self._table_of: Tensor | None = None
        self._arg_max: Tensor | None = None
        joined.keys  # noqa: B018 - checks the ids

    @classmethod
    def merged(cls, lookups: "Sequence[HbmLookup]", widths: Sequence[int]) -> "HbmLookup":
        """See ``Lookup.merged``."""
        joined = Merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode)
        if made._mode == kernels.MAX and len(joined):
            made._arg_max = torch.cat(joined.winners([lookup._winners for lookup in lookups]))
        return made

    @property
    def _winners(self) -> Tensor:
        """int32 [bags, dim]: of each maximum the position that gave it, after ``forward``."""
        if self._arg_max is not None:
            return self._arg_max
        table = self.joined.tables[0]
        shape = len(self.joined.bag_starts) - 1, table.layout.dim  # of empty bags, which nobody looks at
        return torch.full(shape, -1, dtype=torch.int32, device=table.store.device)

    @property
    def _is_empty(self) -> bool:
        return not len(self.joined.keys)

    @property
    def demand(self) -> tuple[Pool, Int64s]:
        """The pool below and the keys, int64 [N], of the rows it will use."""
        return self.joined.tables[0].pool, self.joined.keys

    def _send(self) -> HbmPool:
        """Send the ids to the tables' current pool; while no rows are pinned, a new table may replace the pool."""
        pool = self.joined.tables[0].pool.hot
        assert isinstance(pool, HbmPool), "a lookup in device memory over a pool without"
        if pool is not self._pool:
            joined = self.joined
            self._pool = pool
            owners = np.repeat(np.arange(len(joined.bag_starts) - 1, dtype=np.int32), np.diff(joined.bag_starts))
            indices = np.array([table.index for table in joined.tables], np.int64)
            order = np.argsort(indices)
            self._keys, starts, known, bag_of, columns, ordinals, scale = pool.send(
                joined.keys, joined.bag_starts, indices[order], owners, joined.columns, order.astype(np.int32),
                joined.scale,
            )  # fmt: skip
            given_scale = scale if len(scale) else None
            self._bags = Bags(starts, bag_of, columns, ordinals, joined.batch, given_scale, _step_of(joined.columns))
            self._grouping = pool.group(self._keys)
            with pool.lane.side():
                self._table_of = ordinals[torch.searchsorted(known, self._grouping.keys >> KEY_ROW_BITS)]
        return pool

    @shielded
    def stage(self) -> None:
        """Bring the rows in and keep them pinned until used, as far as the pool has room."""
        if self._is_empty:
            return
        pool = self._send()
        assert self._grouping is not None
        lease = pool.acquire(self._grouping, len(self.joined.keys))
        if lease is not None and not self._keep(pool, lease):
            lease.release()

    def _keep(self, pool: HbmPool, lease: HbmLease) -> bool:
        if not pool.hold(lease):
            return False
        self._lease = lease
        return True

    def release(self) -> None:
        """Unpin all rows. The lookup still works, but must bring its rows in again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _parts(self, pool: HbmPool) -> Iterator[Part]:
        """Leased parts of the batch, in order."""
        assert self._keys is not None
        assert self._grouping is not None
        if self._lease is not None:
            yield Part(0, len(self._keys), self._grouping, self._lease)
        else:
            yield from pool.parts(self._keys, self._grouping)

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """See ``Lookup.forward``; ``out`` is zero on entry."""
        if self._is_empty:
            return
        pool = self._send()
        assert self._bags is not None
        if self._mode == kernels.MAX:
            shape = len(self.joined.bag_starts) - 1, pool.layout.dim
            self._arg_max = torch.full(shape, -1, dtype=torch.int32, device=pool.device)
        for part in self._parts(pool):
            with part.lease.in_use(), pool.rows_lock:
                slots = part.lease.slots[part.grouping.inverse]
                pool.kernels.pool_rows(
                    self._bags, slots, part.first, part.last, mode=self._mode, weights=pool.weights,
                    dim=pool.layout.dim, out=out, arg_max=self._arg_max,
                )  # fmt: skip
            if keep and not part.lease.held and part.last - part.first == len(self.joined.keys):
                self._keep(pool, part.lease)
        if not keep:
            self.release()
        self._retain(pool)

    def _retain(self, pool: HbmPool) -> None:
        """The stream's work so far uses tensors of this lookup, which may be dropped before it is done."""
        pool.retain(self._keys, self._bags, self._grouping, self._table_of)

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """See ``Lookup.scale_gradient``; waits for the device."""
        if self._is_empty:
            return
        pool = self._send()
        assert self._bags is not None
        own = torch.zeros(len(self.joined.keys), dtype=torch.float32, device=pool.device)
        for part in self._parts(pool):
            with part.lease.in_use(), pool.rows_lock:
                slots = part.lease.slots[part.grouping.inverse]
                pool.kernels.dot_rows(
                    self._bags, slots, part.first, part.last, weights=pool.weights, dim=pool.layout.dim,
                    grad_out=grad_out, grad_scale=own,
                )  # fmt: skip
        self._retain(pool)
        self.joined.scatter(own.cpu().numpy(), grad_scale)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """See ``Lookup.update``."""
        hyper = self.joined.next_hyper()
        if self._is_empty:
            return
        pool = self._send()
        grouping = self._grouping
        assert grouping is not None
        codes = tuple(table.config.optimizer.code for table in self.joined.tables)
        sent_hyper = _sent(pool, hyper)
        held, self._lease = self._lease, None
        parts = pool.unique_parts(grouping) if held is None else [Part(0, len(grouping.keys), grouping, held)]
        for part in parts:
            try:
                with part.lease.in_use(), pool.rows_lock:
                    pool.kernels.update_rows(
                        self._bags, _old(grouping), part.lease.slots, part.first, grad_out=grad_out,
                        arg_max=self._arg_max, mean=self._mode == kernels.MEAN, table_of=self._table_of, codes=codes,
                        hyper=sent_hyper, weights=pool.weights, state=pool.state, dim=pool.layout.dim,
                    )  # fmt: skip
            finally:
                # Also where it failed half way: some rows may have changed.
                part.lease.release(changed=True)
        self._retain(pool)

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """See ``Lookup.gradients``."""
        tables = self.joined.tables
        dim = tables[0].layout.dim
        if self._is_empty:
            return by_table(tables, torch.empty(0, dtype=torch.int64), torch.empty(0, dim))
        pool, grouping = self._send(), self._grouping
        assert grouping is not None
        count = len(grouping.keys)
        codes, hyper = adding(len(tables))
        values = torch.zeros((count, dim), dtype=torch.float32, device=pool.device)
        pool.kernels.update_rows(
            self._bags, _old(grouping), torch.arange(count, dtype=torch.int32, device=pool.device), 0,
            grad_out=grad_out, arg_max=self._arg_max, mean=self._mode == kernels.MEAN, table_of=self._table_of,
            codes=tuple(codes.tolist()), hyper=_sent(pool, hyper), weights=values,
            state=values.new_zeros((count, 1)), dim=dim,
        )  # fmt: skip
        self.release()
        self._retain(pool)
        return by_table(tables, grouping.keys, values)


def _old(grouping: Grouping) -> Any:
    count = len(grouping.keys)
    groups = grouping.groups
    return groups._replace(
        order=groups.order.int(),
        starts=groups.starts[: count + 1].long(),
        num_unique=count,  # type: ignore[arg-type]
    )


def _sent(pool: HbmPool, values: Floats) -> Tensor:
    """On the device: the copy is on the compute stream, which nobody may wait for."""
    here = torch.from_numpy(values)
    return here.pin_memory().to(pool.device, non_blocking=True) if pool.lane.pin_memory else here


def _step_of(columns: Int32s) -> int:
    """See ``Bags.column_step``."""
    return int(np.gcd.reduce(columns, initial=_WIDE))
