"""What lookups over ranks have in common; and those where each distinct row crosses once and the requester pools.

Forward: a rank sends the keys of its batch's distinct rows to their owners, they send the rows, and it pools them in
id-list order. Backward: it merges each row's gradients, divides them by the number of ranks and sends them to the
owners, who add those of the ranks in order of the ranks and update the row once. So the bits depend on the number of
ranks, not on who owns what. Of tables that all ranks have whole, a rank looks rows up itself, and sends merged
gradients to all ranks, who add them in the same order. All calls are collective.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hbm.base import DeviceRows, rows_of
from ..hbm.cache import group
from ..hbm.kernel_types import DeviceBatch
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s
from ..kernels.slots import MODES
from ..layout import KEY_ROW_BITS
from ..lookup.base import AnyLookup, Hold, Ready, RowGradients, by_table
from ..lookup.finite import check_gradient
from ..lookup.lookup import make_lookup
from ..optim.configs import RowWiseAdagradOfColumns
from ..optim.rules import mean_squares
from ..pool.backward import merged
from ..pool.joined import NO_ARG_MAX, Joined, Numbering
from ..pool.leases import RowArrays
from .owners import Owners
from .ranks import Precision, Ranks


def with_mean_squares(asked: Joined, gradients: Tensor, num_parts: int, owners: Owners) -> Tensor:
    """What ``RowWiseAdagradOfColumns`` takes: float32 [1, asked * columns + asked], the gradients, float32 [asked,
    columns of a part], and then the mean square of each one's row. Collective.

    The owners of a row's parts were asked for the same rows. Each adds the ranks' gradients up, and sends its part of
    the sum to the others.
    """
    count, width = gradients.shape
    inverse, keys = asked.distinct
    sums = merged(asked, width, gradients.numpy().reshape(1, -1), asked.tables[0].store.workers)
    whole = np.empty((len(keys), num_parts, width), np.float32)
    owner = owners.of(keys, num_parts)
    by_key = np.argsort(keys)
    shared = [by_key[(owner[by_key] == rank).any(1)] for rank in range(owners.ranks.size)]
    counts = [len(rows) for rows in shared]
    sent = torch.from_numpy(sums[np.concatenate(shared)])
    taken = torch.split(owners.ranks.exchange(sent, counts, counts), counts)
    for rank, (rows, part) in enumerate(zip(shared, taken, strict=True)):
        whole[rows, (owner[rows] == rank).argmax(1)] = part.numpy()
    squares = np.empty(count, np.float32)
    squares[asked.columns // width] = mean_squares(whole.reshape(len(keys), num_parts * width))[inverse]
    return torch.cat([gradients.reshape(-1), torch.from_numpy(squares)])[None]


class Sent(NamedTuple):
    """Gradients, float32, of the output of a lookup of this rank's rows.

    Attributes:
        keys: int64, of the rows that each rank sent, each once, if the output has a row for each; else nothing.
    """

    lookup: AnyLookup
    gradient: Tensor
    keys: Sequence[Tensor] = ()


class SendsGradients(ABC):
    """A lookup whose gradients go to the owners of its rows, who train them. ``tables`` are this rank's parts;
    ``holds`` keep the ids of its rows, if they are dynamic."""

    tables: Any
    holds: Sequence[Hold]
    _ranks: Ranks

    @abstractmethod
    def sent(self, grad_out: Tensor) -> "Sent":
        """Send gradients to the owners; what came to this rank."""

    def readied(self, grad_out: Tensor) -> Ready:
        """Exchange gradients and bring the rows in for the update. If this rank fails once the exchange began, others
        may train all the same, so the step must not be repeated. What all ranks refuse before it may be."""
        may_be_trained = False
        if self.tables[0].store.check_finite:
            with self._ranks.telling():
                check_gradient(self, grad_out)
        try:
            sent = self.sent(grad_out)
            may_be_trained = True
            found: Ready = sent.lookup.readied(sent.gradient)
        except BaseException as error:
            if may_be_trained or self._ranks.is_amid_call:
                for table in self.tables:
                    table.store.note_partly_trained(error)
            raise
        return found

    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What ``update`` would apply to this rank's rows, of each table; see ``Lookup.gradients``. What each rank sent
        is apart where it can be: added to earlier gradients one rank after another, it gives the bits of one process.
        RuntimeError: a table is sharded by columns, with row-wise Adagrad."""
        for table in self.tables:
            if isinstance(table.config.optimizer, RowWiseAdagradOfColumns):
                raise RuntimeError(
                    f"gradients of rows of table {table.name!r} cannot be read or added up, as its columns are on "
                    "several ranks and row-wise Adagrad needs whole rows; shard it by rows, or call step() after each "
                    "backward and clip nothing"
                )
        sent = self.sent(grad_out)
        if not sent.keys:
            return sent.lookup.gradients(sent.gradient)
        sent.lookup.release()
        counts = [len(keys) for keys in sent.keys]
        values = torch.split(sent.gradient.view(-1, self.tables[0].layout.dim), counts)
        pairs = zip(sent.keys, values, strict=True)
        return [each for keys, part in pairs for each in by_table(self.tables, keys.to(part.device), part)]


class ShardedLookup(SendsGradients, AnyLookup):
    """A lookup whose ``joined`` has this rank's ids, in ``ShardedTable`` of one layout."""

    own: Any
    """Looks up what ranks ask of this one, once ids are exchanged."""

    def __init__(self, joined: Joined, *, mode: str, owners: Owners) -> None:
        self.joined, self.mode, self.holds = joined, mode, joined.holds
        self._sharded: Any = joined.tables
        self.tables: Any = [table.local for table in self._sharded]
        self._owners, self._ranks = owners, owners.ranks
        self._names = ", ".join([table.name for table in self._sharded])
        self._width: int = self.tables[0].config.embedding_dim
        self._device: torch.device = self.tables[0].store.device

    @property
    def _backward(self) -> str:
        """The words of the call; rates are the same on all ranks."""
        rates = ", ".join([str(each.learning_rate) for each in self._sharded])
        return f"backward of {self._names}, learning rate {rates}"

    @property
    def group(self) -> Hashable:
        table = self._sharded[0]
        return type(self), table.store, table.layout, table.num_parts, self.mode

    @abstractmethod
    def route(self, ranks: Ranks) -> None:
        """Exchange ids, if they were not. ``ranks``: whose group no other thread uses now."""

    def has_room(self) -> bool:
        """Of the rows that are asked of this rank, once ids are exchanged; so in ``stage``."""
        return bool(self.own.has_room())

    def stage(self) -> bool:
        return bool(self.own.stage())


class RoutedLookup(ShardedLookup):
    """A lookup whose ids go to the owners of the rows, whence values come."""

    def __init__(self, joined: Joined, *, mode: str, owners: Owners) -> None:
        super().__init__(joined, mode=mode, owners=owners)
        self._known_route: Any = None
        self._batch = ""

    @abstractmethod
    def _find_route(self, ranks: Ranks) -> Any:
        """Exchange ids; what is known then."""

    def route(self, ranks: Ranks) -> None:
        if self._known_route is None:
            self._known_route = self._find_route(ranks)
            self._batch = ranks.next_batch()

    @property
    def _route(self) -> Any:
        self.route(self._ranks)
        return self._known_route

    def release(self) -> None:
        if "own" in self.__dict__:
            self.own.release()

    def _from_owners(self, given: Sequence[int], asked: Sequence[int], *, keep: bool) -> Tensor:
        """float32 [sum of asked, width]: results of the owners' lookups, in order of the owners."""
        with self._ranks.together(f"lookup of {self._names}, {self._batch}", then=1):
            out = torch.empty((1, sum(given) * self._width), dtype=torch.float32, device=self._device)
            self.own.forward(out, keep=keep)
        return self._crossed(out.view(-1, self._width), given, asked, self._owners.wire.forward)

    def _sending(self, *, then: int = 1) -> contextlib.AbstractContextManager[None]:
        """Around what makes gradients to be sent, which are then exchanged."""
        self.route(self._ranks)
        return self._ranks.together(f"{self._backward}, {self._batch}", then=then)

    def _to_owners(self, gradients: Tensor, given: Sequence[int], asked: Sequence[int]) -> Tensor:
        """Send gradients of what ``_from_owners`` gave; what came to this rank: float32 [sum of given, width]."""
        return self._crossed(gradients, asked, given, self._owners.wire.backward)

    def _crossed(self, rows: Tensor, given: Sequence[int], taken: Sequence[int], precision: Precision) -> Tensor:
        return self._ranks.exchange_rows(rows, given, taken, precision)


class RowsRoute(NamedTuple):
    """The way of a batch's rows.

    Attributes:
        order: int64 [U * parts], the rows' parts in order of their owners.
        places: int32 [U], where each row is; in order of the owners, or by number if rows have several parts.
        asked, given: how many this rank asks each for, and each this one. keys: int64, of the latter.
    """

    order: Int64s
    places: Int32s
    asked: list[int]
    given: list[int]
    keys: Int64s


class RowsLookup(RoutedLookup):
    """A lookup whose distinct rows come from their owners. Where a table's columns are on several ranks, each gives
    its part of the row."""

    _no_arg_max: Any = NO_ARG_MAX

    def __init__(self, joined: Joined, *, mode: str, owners: Owners) -> None:
        super().__init__(joined, mode=mode, owners=owners)
        self._mode = MODES[mode]
        self._arg_max = self._no_arg_max
        self._rows: Tensor | None = None
        self._num_parts: int = self._sharded[0].num_parts
        self._dim: int = joined.tables[0].layout.dim

    @classmethod
    def merged(cls, lookups: Sequence["RowsLookup"], widths: Sequence[int]) -> Self:
        joined = Joined.merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode, owners=lookups[0]._owners)
        if made._mode == kernels.MAX and joined.parts is not None:
            winners = joined.parts.winners([lookup._arg_max for lookup in lookups])
            made._arg_max = (torch.cat if isinstance(winners[0], Tensor) else np.concatenate)(winners)
        return made

    @cached_property
    def own(self) -> AnyLookup:
        return make_lookup(Joined.of_keys(self.tables, self._route.keys), mode="sum")

    def _find_route(self, ranks: Ranks) -> RowsRoute:
        with ranks.telling():
            _, keys = self.joined.distinct
            owners = self._owners.of(keys, self._num_parts).ravel()
            order = np.argsort(owners, kind="stable")  # of 16 bits each: numpy sorts by their digits then
            asked = np.bincount(owners, minlength=ranks.size).tolist()
            sent = torch.from_numpy(keys[order // self._num_parts])
        given = ranks.counts(asked, f"lookup of {self._names}", then=1)
        wanted = ranks.exchange(sent, asked, given)
        places = np.arange(len(keys), dtype=np.int32)
        if self._num_parts == 1:
            places[order] = places.copy()
        return RowsRoute(order, places, asked, given, wanted.numpy())

    @cached_property
    def _slots(self) -> Int32s:
        """int32 [N], where the row of each position is."""
        places: Int32s = self._route.places
        return places[self.joined.distinct[0]]

    def release(self) -> None:
        self._rows = None
        super().release()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        route = self._route
        rows = self._side_by_side(self._from_owners(route.given, route.asked, keep=keep))
        self._pool(rows, out)
        self._rows = rows if keep and len(self.joined.scale) else None

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        if not len(self.joined):
            return
        assert self._rows is not None, "after a forward that keeps, with scale"
        self.joined.scatter(self._dot(self._rows, grad_out), grad_scale)

    def _pool(self, rows: Tensor, out: Tensor) -> None:
        """Pool every bag of the rows, float32 [U, dim], into ``out``."""
        joined = self.joined
        if self._mode == kernels.MAX:
            self._arg_max = np.empty((joined.num_bags, self._dim), np.int32)
        own, workers = RowArrays.plain(rows.numpy()), joined.tables[0].store.workers
        own.pool(workers, joined, self._mode, out.numpy(), self._arg_max, 0, self._slots)

    def _dot(self, rows: Tensor, grad_out: Tensor) -> Floats:
        """float32 [N]: the gradient of the weight of each position."""
        own = np.zeros(len(self.joined), np.float32)
        RowArrays.plain(rows.numpy()).dot(self.joined, grad_out.numpy(), 0, self._slots, own)
        return own

    def _merged(self, grad_out: Tensor) -> Tensor:
        """float32 [U, dim]: the gradient of each row, where ``RowsRoute.places`` has it."""
        workers, is_mean = self.joined.tables[0].store.workers, self._mode == kernels.MEAN
        found = merged(
            self.joined, self._dim, grad_out.numpy(), workers, arg_max=self._arg_max, is_mean=is_mean,
            places=self._route.places,
        )  # fmt: skip
        return torch.from_numpy(found)

    def _side_by_side(self, parts: Tensor) -> Tensor:
        """float32 [U, dim] of the parts as their owners gave them."""
        if self._num_parts == 1:
            return parts
        by_row = torch.empty_like(parts)
        by_row[self._order] = parts
        return by_row.view(-1, self._dim)

    def _in_parts(self, rows: Tensor) -> Tensor:
        return rows if self._num_parts == 1 else rows.view(-1, self._width)[self._order]

    @property
    def _order(self) -> Tensor:
        return torch.from_numpy(self._route.order).to(self._device)

    def sent(self, grad_out: Tensor) -> Sent:
        route = self._route
        needs_squares = self._num_parts > 1 and isinstance(self.tables[0].config.optimizer, RowWiseAdagradOfColumns)
        with self._sending(then=2 if needs_squares else 1):
            sent = self._in_parts(self._merged(grad_out)).div_(self._ranks.size)
        taken = self._to_owners(sent, route.given, route.asked)
        if needs_squares:
            return Sent(self.own, with_mean_squares(self.own.joined, taken, self._num_parts, self._owners))
        return Sent(self.own, taken.view(1, -1), torch.split(torch.from_numpy(route.keys), route.given))


class DeviceRowsLookup(RowsLookup):
    """``RowsLookup`` where rows are pooled, and their gradients merged, in device memory. The order of all additions is
    that of the host, so the bits are."""

    _no_arg_max = None

    @cached_property
    def _sent_batch(self) -> tuple[DeviceRows, DeviceBatch]:
        """The batch, where ``rows`` are the places of its rows."""
        rows = rows_of(self.tables[0].pool)

        def write(_: Numbering | None, out: NDArray[Any]) -> None:
            out[:] = self._slots

        return rows, rows.send(self.joined, write)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[tuple[DeviceRows, DeviceBatch, Tensor]]:
        """Also the place of each position's row, int32 [N]; all are kept until the work given within is done."""
        rows, batch = self._sent_batch
        rows.streams.follow(batch.ready)
        slots = batch.rows.to(torch.int32)
        try:
            yield rows, batch, slots
        finally:
            rows.retain(batch, self._arg_max)

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
                batch.bags, group(slots), len(self._route.places), num_tables=len(self.tables), dim=self._dim,
                grad_out=grad_out, arg_max=self._arg_max, is_mean=self._mode == kernels.MEAN,
            )  # fmt: skip


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
        ranks = self._ranks
        # Of what fails here others learn in backward, or now if there is none.
        with ranks.telling() if keep else ranks.together(f"lookup of {self._names}, {ranks.next_batch()}"):
            self.own.forward(out, keep=keep)

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        self.own.scale_gradient(grad_out, grad_scale)

    def sent(self, grad_out: Tensor) -> Sent:
        ranks = self._ranks
        with ranks.telling():
            found = self.own.gradients(grad_out)
            own = torch.cat([each.rows | (each.table.index << KEY_ROW_BITS) for each in found]).cpu()
            keys = own.repeat(ranks.size)
            values = (torch.cat([each.values for each in found]) / ranks.size).repeat(ranks.size, 1)
            given = [len(keys) // ranks.size] * ranks.size
        taken = ranks.counts(given, self._backward, then=2)
        all_keys = ranks.exchange(keys, given, taken)
        gradients = ranks.exchange_rows(values, given, taken, self._owners.wire.backward)
        lookup = make_lookup(Joined.of_keys(self.tables, np.ascontiguousarray(all_keys.numpy())), mode="sum")
        return Sent(lookup, gradients.view(1, -1), torch.split(all_keys, taken))
