"""Lookups in tables of which every rank has all rows.

Forward looks rows up here. Backward merges each row's gradients, divides them by the number of ranks, and sends them to
all ranks, who add those of the ranks in order of the ranks. So all copies stay equal, and the bits are those of a table
whose rows have one owner each.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..kernels.arrays import Floats
from ..layout import KEY_ROW_BITS
from ..lookup.joined import Joined
from ..lookup.lookup import make_lookup
from .lookup import Sent, ShardedLookup
from .owners import Owners
from .ranks import Ranks


class ReplicatedLookup(ShardedLookup):
    def __init__(self, joined: Joined, *, mode: str, owners: Owners, own: Any = None) -> None:
        super().__init__(joined, mode=mode, owners=owners)
        self.own = make_lookup(joined, mode=mode) if own is None else own

    @classmethod
    def merged(cls, lookups: Sequence["ReplicatedLookup"], widths: Sequence[int]) -> Self:
        kind: Any = type(lookups[0].own)
        own = kind.merged([lookup.own for lookup in lookups], widths)
        return cls(own.joined, mode=own.mode, owners=lookups[0]._owners, own=own)

    def route(self, ranks: Ranks) -> None:
        """Ids stay here."""

    def release(self) -> None:
        self.own.release()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        with self._ranks.together(f"lookup of {self._names}, {self._ranks.next_batch()}"):
            self.own.forward(out, keep=keep)

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        self.own.scale_gradient(grad_out, grad_scale)

    def sent(self, grad_out: Tensor) -> Sent:
        ranks = self._ranks
        with ranks.telling():
            found = self.own.gradients(grad_out)
            keys = (
                torch.cat([each.rows | (each.table.index << KEY_ROW_BITS) for each in found]).cpu().repeat(ranks.size)
            )
            values = (torch.cat([each.values for each in found]).cpu() / ranks.size).repeat(ranks.size, 1)
            given = [len(keys) // ranks.size] * ranks.size
        taken = ranks.counts(given, f"backward of {self._names}, {self._rates}", then=2)
        all_keys = ranks.exchange(keys, given, taken)
        gradients = ranks.exchange_rows(values, given, taken, self._owners.wire.backward)
        lookup = make_lookup(Joined.of_keys(self.tables, np.ascontiguousarray(all_keys.numpy())), mode="sum")
        return Sent(lookup, gradients.view(1, -1), torch.split(all_keys, taken))
