"""Rows that came from their owners, pooled in device memory, and their gradients merged there: the order of all
additions is that of the host, so the bits are."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hbm.base import DeviceBatch, DeviceRows, rows_of
from ..hbm.cache import group_slots
from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..pool.bags import Numbering
from .lookup import RowsLookup


class DeviceRowsLookup(RowsLookup):
    """``RowsLookup`` where rows are in device memory."""

    @cached_property
    def _sent_batch(self) -> tuple[DeviceRows, DeviceBatch]:
        """The batch, where ``rows`` are the places of its rows."""
        rows = rows_of(self.tables[0].pool)

        def write(_: Numbering | None, out: NDArray[Any]) -> None:
            out[:] = self._slots

        return rows, rows.send(self.joined.bags, write)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[tuple[DeviceRows, DeviceBatch, Tensor]]:
        """Also the place of each position's row, int32 [N]; all are kept until the work given within is done."""
        rows, batch = self._sent_batch
        rows.lane.follow(batch.ready)
        slots = batch.rows.to(torch.int32)
        try:
            yield rows, batch, slots
        finally:
            rows.retain(batch, self._arg_max)

    def _no_arg_max(self) -> Any:
        return None

    def _end_to_end(self, arg_max: Sequence[Any]) -> Any:
        return torch.cat(list(arg_max))

    def _pool(self, rows: Tensor, out: Tensor) -> None:
        joined, shape = self.joined, (self.joined.num_bags, self._dim)
        if self._mode == kernels.MAX:
            self._arg_max = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        if not len(joined):
            for column in joined.features.columns.tolist():
                out[:, column : column + self._dim] = 0
            return
        with self._on_device() as (device, batch, slots):
            device.kernels.pool_rows(
                batch.bags, slots, None, 0, len(joined), mode=self._mode, weights=rows, dim=self._dim, out=out,
                arg_max=self._arg_max,
            )  # fmt: skip

    def _dot(self, rows: Tensor, grad_out: Tensor) -> Floats:
        with self._on_device() as (device, batch, slots):
            own = torch.zeros(len(batch), dtype=torch.float32, device=self._device)
            device.kernels.dot_rows(
                batch.bags, slots, None, 0, len(batch), weights=rows, dim=self._dim, grad_out=grad_out, grad_scale=own
            )
        found: Floats = own.cpu().numpy()
        return found

    def _merged(self, grad_out: Tensor) -> Tensor:
        if not len(self.joined):
            return torch.empty((0, self._dim), device=self._device)
        with self._on_device() as (device, batch, slots):
            return device.merged(
                batch.bags, group_slots(slots)[1], len(self._route.places), num_tables=len(self.tables), dim=self._dim,
                grad_out=grad_out, arg_max=self._arg_max, is_mean=self._mode == kernels.MEAN,
            )  # fmt: skip
