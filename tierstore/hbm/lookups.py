"""Pooled lookups in device memory, with the same results as in host memory.

The host joins and checks the ids while it writes them to page-locked memory, and sends them with the bags' starts by
one copy on the side stream; ids that are on the device already are joined there (``lookup.jagged.DeviceJagged``).
Forward and backward run on the caller's current stream.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels import slots as kernels
from ..kernels.arrays import Floats
from ..optim.configs import Hyper
from ..pool.joined import Joined
from ..pool.tier import Tier


class DeviceLookups(Tier):
    """What ``pool.tier.Tier`` says of lookups, by what ``DeviceRows`` does with batches that were sent."""

    def _batch_of(self: Any, joined: Joined) -> Any:
        """The batch on the device; of merged ones, joined there from those of the parts."""
        self.begin()
        if joined.tier is not self:
            if joined.tier is not None:
                joined.note_keys(joined.tier.position_keys(joined.sent))
            sent = self.send(joined, joined.write, self._known_rows(joined))
            joined.tier, joined.sent = self, sent
        return joined.sent

    def _known_rows(self: Any, joined: Joined) -> Tensor | None:
        parts = joined.parts
        if parts is None:
            return None
        pieces = [self._batch_of(each) if len(each) else None for each in parts.joined]
        empty = torch.empty(0, dtype=self.row_dtype, device=self.device)
        for piece in pieces:
            if piece is not None:
                self.streams.follow(piece.rows_ready)
        known = torch.cat(parts.over_positions([empty if piece is None else piece.rows for piece in pieces]))
        self.retain(*pieces)
        return known

    @contextlib.contextmanager
    def _using(self: Any, joined: Joined, *others: Any) -> Iterator[Any]:
        """The batch; what kernels read is kept until the work given within is done."""
        batch = self._batch_of(joined)
        try:
            yield batch
        finally:
            self.retain(batch, *others)

    @abstractmethod
    def batch_has_room(self, batch: Any) -> bool: ...

    def has_room(self, joined: Joined) -> bool:
        return not len(joined) or self.batch_has_room(self._batch_of(joined))

    def stage(self: Any, joined: Joined) -> Any:
        return self.stage_batch(self._batch_of(joined))

    def look_up(self: Any, joined: Joined, mode: int, out: Tensor, lease: Any, *, keep: bool) -> tuple[Any, Any]:
        given, dim, arg_max = lease, self.layout.dim, None
        if mode == kernels.MAX:
            arg_max = torch.empty((joined.num_bags, dim), dtype=torch.int32, device=self.device)
        if not len(joined):
            for column in joined.columns.tolist():
                out[:, column : column + dim] = 0
            return lease, None if arg_max is None else arg_max.fill_(-1)
        with self._using(joined, arg_max) as batch:
            for part in self.parts(batch, lease):
                with part.lease.in_use():
                    self.kernels.pool_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, mode=mode, weights=self.weights,
                        dim=dim, out=out, arg_max=arg_max,
                    )  # fmt: skip
                is_whole = part.last - part.first == len(batch)
                if keep and is_whole and not part.lease.held and self.hold(part.lease):
                    lease = part.lease
            try:
                self.note(batch)
            except BaseException:
                if lease is not given:
                    lease.release()
                raise
        return lease, arg_max

    def dot(self: Any, joined: Joined, grad_out: Tensor, lease: Any) -> Floats:
        """Waits for the device."""
        with self._using(joined) as batch:
            own = torch.zeros(len(batch), dtype=torch.float32, device=self.device)
            for part in self.parts(batch, lease):
                with part.lease.in_use():
                    self.kernels.dot_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, weights=self.weights,
                        dim=self.layout.dim, grad_out=grad_out, grad_scale=own,
                    )  # fmt: skip
        found: Floats = own.cpu().numpy()
        return found

    def whole(self: Any, joined: Joined, lease: Any) -> Any:
        with self._using(joined) as batch:
            return self.whole_batch(batch, lease)

    def update(
        self: Any, joined: Joined, mode: int, hyper: list[Hyper], grad_out: Tensor, arg_max: Any, lease: Any
    ) -> None:
        rules = self.rules(tuple(joined.tables), hyper)
        with self._using(joined, arg_max, rules) as batch:
            groups = self.groups(batch)
            for part in self.parts(batch, lease, by_row=True):
                try:
                    with part.lease.in_use(changes=True):
                        self.kernels.update_rows(
                            batch.bags, groups, part.slots, part.first, grad_out=grad_out, arg_max=arg_max,
                            mean=mode == kernels.MEAN, **rules._asdict(), weights=self.weights, state=self.state,
                            dim=self.layout.dim, dirty=self.dirty,
                        )  # fmt: skip
                finally:
                    part.lease.release()

    def gradients(self: Any, joined: Joined, mode: int, grad_out: Tensor, arg_max: Any) -> tuple[Tensor, Tensor]:
        """Waits for the device."""
        dim = self.layout.dim
        if not len(joined):
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
        with self._using(joined, arg_max) as batch:
            self.require_right(batch)
            groups, keys = self.groups(batch), self.keys(batch)
            values = self.merged(
                batch.bags, groups, len(keys), num_tables=len(joined.tables), dim=dim, grad_out=grad_out,
                arg_max=arg_max, is_mean=mode == kernels.MEAN,
            )  # fmt: skip
        return keys, values
