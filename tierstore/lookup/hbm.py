"""One pooled lookup in device memory: the twin of ``lookup.Lookup``, with the same results.

The host joins and checks the ids while it writes them to page-locked memory, and sends them with the bags' starts by
one copy on the side stream; ids that are on the device already are joined there (``DeviceJagged``). Forward and
backward run on the caller's current stream.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..hbm.base import DeviceBatch, DeviceLease, DeviceRows, Rules, rows_of
from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..pool import Pool
from ..system.signals import shielded
from .joined import AnyLookup, Joined
from .tables import Ready, RowGradients, by_table


class HbmLookup(AnyLookup):
    """``stage`` and ``forward`` raise ValueError for an id outside its table. If the device joins the ids, a later call
    may raise it instead: see ``hbm.kernel_types.IdCheck``."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.joined = joined
        self.mode = mode
        self._mode = kernels.MODES[mode]
        self._lease: DeviceLease | None = None
        self._rows: DeviceRows | None = None
        self._batch: DeviceBatch | None = None
        if joined.sent is not None:
            self._rows, self._batch = joined.rows, joined.sent
        self._parts: Sequence[HbmLookup] = ()
        self._arg_max: Tensor | None = None
        self._rules: Rules | None = None

    @classmethod
    def merged(cls, lookups: "Sequence[HbmLookup]", widths: Sequence[int]) -> "HbmLookup":
        joined = Joined.merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode)
        made._parts = lookups
        if made._mode == kernels.MAX and len(joined):
            assert joined.parts is not None
            made._arg_max = torch.cat(joined.parts.winners([lookup._winners for lookup in lookups]))
        return made

    @property
    def _winners(self) -> Tensor:
        """int32 [bags, dim]: of each maximum the position that gave it, after ``forward``."""
        if self._arg_max is not None:
            return self._arg_max
        table = self.joined.tables[0]
        shape = self.joined.num_bags, table.layout.dim  # of empty bags, which nobody looks at
        return torch.full(shape, -1, dtype=torch.int32, device=table.store.device)

    @property
    def _is_empty(self) -> bool:
        return not len(self.joined)

    def _sent(self, pool: Pool) -> tuple[DeviceRows, DeviceBatch]:
        rows = rows_of(pool)
        rows.begin()
        if rows is not self._rows or self._batch is None:
            if self._rows is not None and self._batch is not None:
                self.joined.note_keys(self._rows.position_keys(self._batch))
            known = self._known_rows(pool, rows)
            self._rows, self._batch = rows, rows.send(self.joined.bags, self.joined.write, known)
        return rows, self._batch

    def _known_rows(self, pool: Pool, rows: DeviceRows) -> Tensor | None:
        """The merged positions' rows, joined on the device from those of the parts."""
        parts = self.joined.parts
        if parts is None:
            return None
        pieces = [lookup._sent(pool)[1] if len(lookup.joined) else None for lookup in self._parts]
        empty = torch.empty(0, dtype=rows.row_dtype, device=rows.device)
        for piece in pieces:
            if piece is not None:
                rows.streams.follow(piece.rows_ready)
        known = torch.cat(parts.over_positions([empty if piece is None else piece.rows for piece in pieces]))
        rows.retain(*pieces)
        return known

    def has_room(self) -> bool:
        if self._is_empty:
            return True

        def has_room(pool: Pool) -> bool:
            rows, batch = self._sent(pool)
            return rows.has_room(batch)

        return self.joined.tables[0].in_pool(has_room)

    @shielded
    def stage(self) -> bool:
        if self._is_empty:
            return True

        def stage(pool: Pool) -> DeviceLease | None:
            rows, batch = self._sent(pool)
            return rows.stage(batch)

        self._lease = self.joined.tables[0].in_pool(stage)
        return self._lease is not None

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @contextlib.contextmanager
    def _on_device(self, pool: Pool) -> Iterator[tuple[DeviceRows, DeviceBatch]]:
        """As ``_sent``; what kernels read is kept until the work given within is done."""
        rows, batch = self._sent(pool)
        try:
            yield rows, batch
        finally:
            rows.retain(batch, self._arg_max, self._rules)

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        table = self.joined.tables[0]
        if self._is_empty:
            for column in self.joined.features.columns.tolist():
                out[:, column : column + table.layout.dim] = 0
            return
        table.in_pool(partial(self._forward, out, keep=keep))

    def _forward(self, out: Tensor, pool: Pool, *, keep: bool) -> None:
        with self._on_device(pool) as (rows, batch):
            if self._mode == kernels.MAX:
                shape = self.joined.num_bags, rows.layout.dim
                self._arg_max = torch.empty(shape, dtype=torch.int32, device=rows.device)
            for part in rows.parts(batch, self._lease):
                with part.lease.in_use():
                    rows.kernels.pool_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, mode=self._mode,
                        weights=rows.weights, dim=rows.layout.dim, out=out, arg_max=self._arg_max,
                    )  # fmt: skip
                is_whole = part.last - part.first == len(batch)
                if keep and is_whole and not part.lease.held and rows.hold(part.lease):
                    self._lease = part.lease
            rows.note(batch)
            if not keep:
                self.release()

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Waits for the device."""
        if self._is_empty:
            return
        with self._on_device(self.joined.tables[0].pool) as (rows, batch):
            own = torch.zeros(len(batch), dtype=torch.float32, device=rows.device)
            for part in rows.parts(batch, self._lease):
                with part.lease.in_use():
                    rows.kernels.dot_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, weights=rows.weights,
                        dim=rows.layout.dim, grad_out=grad_out, grad_scale=own,
                    )  # fmt: skip
        self.joined.scatter(own.cpu().numpy(), grad_scale)

    @shielded
    def readied(self, grad_out: Tensor) -> Ready:
        if not self._is_empty:
            self.joined.tables[0].in_pool(self._bring_in)
        return Ready(partial(self.update, grad_out), self._is_empty or self._lease is not None)

    def _bring_in(self, pool: Pool) -> None:
        """Bring the rows in, if they fit together."""
        with self._on_device(pool) as (rows, batch):
            self._lease = rows.whole(batch, self._lease)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        joined = self.joined
        if self._is_empty:
            joined.next_hyper()
            return
        with self._on_device(self.joined.tables[0].pool) as (rows, batch):
            self._rules = rules = rows.rules(tuple(joined.tables), joined.next_hyper())
            groups = rows.groups(batch)
            held, self._lease = self._lease, None
            for part in rows.parts(batch, held, by_row=True):
                try:
                    with part.lease.in_use(changes=True):
                        rows.kernels.update_rows(
                            batch.bags, groups, part.slots, part.first, grad_out=grad_out, arg_max=self._arg_max,
                            mean=self._mode == kernels.MEAN, **rules._asdict(), weights=rows.weights,
                            state=rows.state, dim=rows.layout.dim, dirty=rows.dirty,
                        )  # fmt: skip
                finally:
                    part.lease.release()

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """Waits for the device."""
        tables = self.joined.tables
        dim = tables[0].layout.dim
        if self._is_empty:
            return by_table(tables, torch.empty(0, dtype=torch.int64), torch.empty(0, dim))
        with self._on_device(self.joined.tables[0].pool) as (rows, batch):
            rows.require_right(batch)
            groups = rows.groups(batch)
            keys = rows.keys(batch)
            values = rows.merged(
                batch.bags, groups, len(keys), num_tables=len(tables), dim=dim, grad_out=grad_out,
                arg_max=self._arg_max, is_mean=self._mode == kernels.MEAN,
            )  # fmt: skip
            self.release()
        return by_table(tables, keys, values)
