"""A lookup whose rows are on many ranks: each distinct row of a rank's batch crosses once, the asker pools.

Forward: a rank sends the keys of its batch's distinct rows to their owners, they send the rows, and it pools them in
id-list order. Backward: it divides gradients by the number of ranks, merges each row's and sends them to the owners,
who add those of the ranks in order of the ranks and update the row once. So the bits depend on the number of ranks,
not on who owns what.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels.arrays import Floats, Int32s, Int64s
from ..kernels.floats import FLOAT32
from ..lookup.contract import AnyLookup
from ..lookup.joined import Joined
from ..lookup.lookup import MODES, new_output
from ..lookup.merging import Merged
from ..lookup.tables import LookupTable, RowGradients
from ..pool import Pool
from ..pool.backward import NO_ARG_MAX, NO_FLOATS, Bags, Groups
from ..pool.evicting import unique
from ..rows import KEY_ROW_BITS
from ..store.table import make_lookup
from .owners import Owners


class _Asked(Joined):
    """Rows that ranks ask this one for: a bag for each, its result where the asker has it, in a flat output."""

    def __init__(self, tables: Sequence[LookupTable], keys: Int64s) -> None:
        indices = [table.index for table in tables]
        places = np.zeros(max(indices) + 1, np.int64)
        places[indices] = np.arange(len(indices))
        table_of = places[keys >> KEY_ROW_BITS]
        order = np.argsort(table_of, kind="stable")
        self.tables = list(tables)
        self.batch = 1
        self.table_bags = np.searchsorted(table_of[order], np.arange(len(tables) + 1))
        self.bag_starts = np.arange(len(keys) + 1)
        columns: Any = order * tables[0].layout.dim
        self.columns = columns
        self.scale = NO_FLOATS
        self._keys = keys[order]
        self._slots = self._numbering = None


class _Route(NamedTuple):
    """The way of a batch's rows.

    Attributes:
        inverse: int32 [N], the number of each position's row, in order of first use.
        order: int64 [U], the rows' numbers in order of their owners.
        slots: int32 [N], where each position's row is in what came from the owners.
        asked: rows that this rank asks each for. given: rows that each asks this one for.
        lookup: of those.
    """

    inverse: Int32s
    order: Int64s
    slots: Int32s
    asked: list[int]
    given: list[int]
    lookup: AnyLookup


class ShardedLookup:
    """See the module's docstring; the contract is that of ``lookup.Lookup``. Collective: all ranks make the same calls.

    Args:
        joined: this rank's ids, in tables of one pool.
        mode: "sum", "mean" or "max".
        owners: of the rows.
    """

    def __init__(self, joined: Joined, *, mode: str, owners: Owners) -> None:
        self.wants_zeros = False
        self.joined = joined
        self.mode = mode
        self._owners = owners
        self._mode = MODES[mode]
        self._arg_max = NO_ARG_MAX
        self._known_route: _Route | None = None
        self._rows: Tensor | None = None

    @classmethod
    def merged(cls, lookups: "Sequence[ShardedLookup]", widths: Sequence[int]) -> "ShardedLookup":
        """See ``Lookup.merged``."""
        joined = Merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode, owners=lookups[0]._owners)
        if made._mode == kernels.MAX:
            made._arg_max = np.concatenate(joined.winners([lookup._arg_max for lookup in lookups]))
        return made

    @property
    def demand(self) -> tuple[Pool, Int64s]:
        """The pool and the keys, int64 [N], of the rows that ranks ask this one for."""
        return self._route.lookup.demand

    @property
    def _dim(self) -> int:
        return self.joined.tables[0].layout.dim

    @property
    def _route(self) -> _Route:
        if self._known_route is None:
            self._known_route = self._find_route()
        return self._known_route

    def _find_route(self) -> _Route:
        ranks = self._owners.ranks
        try:
            inverse, keys = unique(self.joined.keys)
        except BaseException:
            ranks.counts(None)
            raise
        owner = self._owners.of(keys)
        order = np.argsort(owner, kind="stable")
        asked = np.bincount(owner, minlength=ranks.size).tolist()
        given = ranks.counts(asked)
        wanted = ranks.exchange(torch.from_numpy(keys[order]), asked, given).numpy()
        places = np.empty(len(order), np.int32)
        places[order] = np.arange(len(order), dtype=np.int32)
        with ranks.together():
            lookup = make_lookup(_Asked(self.joined.tables, wanted), mode="sum")
        return _Route(inverse, order, places[inverse], asked, given, lookup)

    def stage(self) -> None:
        """Ask for the rows; owners bring them in."""
        self._route.lookup.stage()

    def release(self) -> None:
        """See ``Lookup.release``."""
        self._rows = None
        if self._known_route is not None:
            self._known_route.lookup.release()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """See ``Lookup.forward``."""
        joined, route, ranks = self.joined, self._route, self._owners.ranks
        with ranks.together():
            given = new_output([route.lookup], (1, sum(route.given) * self._dim), torch.device("cpu"))
            route.lookup.forward(given, keep=keep)
        rows = ranks.exchange(given.view(-1, self._dim), route.given, route.asked)
        if self._mode == kernels.MAX:
            self._arg_max = np.empty((len(joined.bag_starts) - 1, self._dim), np.int32)
        slots, weights, result = route.slots, rows.numpy(), out.numpy()

        def work(begin: int, end: int) -> None:
            kernels.pool_rows(
                begin, end, 0, len(slots), joined.bag_starts, slots, joined.scale, self._mode, weights, self._dim,
                FLOAT32, joined.columns, joined.batch, result, self._arg_max,
            )  # fmt: skip

        joined.tables[0].store.workers.share(work, joined.bag_starts)
        self._rows = rows if keep and len(joined.scale) else None

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """See ``Lookup.scale_gradient``."""
        joined, slots = self.joined, self._route.slots
        if not len(joined):
            return
        assert self._rows is not None, "after a forward that keeps, with scale"
        own = np.zeros(len(joined), np.float32)
        kernels.dot_rows(
            0, len(joined.bag_starts) - 1, 0, len(slots), joined.bag_starts, slots, self._rows.numpy(), self._dim,
            FLOAT32, joined.columns, joined.batch, grad_out.numpy(), own,
        )  # fmt: skip
        joined.scatter(own, grad_scale)

    def update(self, grad_out: Tensor) -> None:
        """See ``Lookup.update``."""
        self._route.lookup.update(self._send(grad_out))

    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What ``update`` would apply to this rank's rows, of each table; see ``Lookup.gradients``."""
        return self._route.lookup.gradients(self._send(grad_out))

    def _send(self, grad_out: Tensor) -> Tensor:
        """Merged gradients to the owners; returns what came to this rank, flat float32 [1, rows * dim]."""
        joined, route, ranks = self.joined, self._route, self._owners.ranks
        grad_out = grad_out / ranks.size
        bags = Bags(
            joined.table_bags, joined.bag_starts, joined.columns, joined.batch, joined.scale,
            self._mode == kernels.MEAN, self._arg_max,
        )  # fmt: skip
        groups = Groups(bags, grad_out.shape[1], joined.tables[0].store.workers)
        merged: Any = groups.merged(route.inverse, len(route.order), self._dim, grad_out.numpy())
        sent = torch.from_numpy(merged[route.order])
        return ranks.exchange(sent, route.asked, route.given).view(1, -1)
