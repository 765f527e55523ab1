"""Tables as lookups know them, and one pooled lookup: the ids of some features of one pool, where each bag's result
goes, forward and fused backward.

Features must be ordered so that those sharing a table are neighbours. A lookup is used once: prepared (perhaps
ahead, by the prefetch pipeline), run forward, and, if gradients are wanted, run backward.
"""

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import ClosedError, IdError, ReadOnlyError, TableError
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import NEAREST, update_seed
from ..layout import KEY_ROW_BITS, ROW_MASK, RowLayout
from ..optim.configs import Hyper
from ..pool.joined import Joined
from ..pool.pool import Pool
from ..pool.tier import Tier
from ..system.signals import shielded
from .dynamic import Found, Hold, Sought, Use, with_rows

_T = TypeVar("_T")
_P = ParamSpec("_P")


class RowGradients(NamedTuple):
    """Merged gradients of a table's rows: int64 [U], distinct, and float32 [U, dim], on the store's device."""

    table: "LookupTable"
    rows: Tensor
    values: Tensor


class Ready(NamedTuple):
    """An update whose rows are in: ``train`` makes it, and releases them. Unless it ``is_whole``, it brings rows in
    part by part."""

    train: Callable[[], object]
    is_whole: bool


class LookupTable(ABC):
    """A table as lookups know it: where its rows are now, and how they are trained.

    Attributes:
        store: the ``store.Store`` that it is of.
        config: its configuration.
        index: its number in the store.
        layout: how its rows lie in memory.
        rows: the rows that this store uses; all, but for tables that are sharded over processes. To be set before the
            first use, or by ``Store.use_rows``.
        first_rate: where a new ``Store.optimizer`` starts: ``config.optimizer.lr``, or what ``learning_rate`` was set
            to since the store was opened.
        is_gone: the store has moved to a version without it.
        num_changes: how often its rows were updated, written, or replaced by those of another version.
        follows: gives the parameter group of a torch optimizer whose ``lr`` is this table's, None once that is gone.
        converted: gives the module of a model that became one over this table, None once that is gone.
    """

    follows: Callable[[], Mapping[str, Any] | None] | None = None
    converted: Callable[[], Any] | None = None

    def __init__(self, store: Any, config: TableConfig, index: int, layout: RowLayout) -> None:
        self.store = store
        self.config = config
        self.index = index
        self.layout = layout
        self.rows = config.rows
        self.is_gone = False
        self._known_pool: Callable[[], Pool | None] = lambda: None
        self._learning_rate = self.first_rate = config.optimizer.lr
        self._step = self.num_changes = 0

    @property
    def name(self) -> str:
        """Of its configuration."""
        return self.config.name

    @abstractmethod
    def keys_of(self, ids: Int64s, use: Use) -> Found:
        """Of the rows of these ids; errors as ``id_error``."""

    @property
    def pool(self) -> Pool:
        """The pool of its rows. ClosedError in a closed store, TableError if the version shown has no such table."""
        if self.is_gone:
            raise TableError(
                f"table {self.name!r} is not in the version that the store shows; if one of that name is there again, "
                f"take it again: store[{self.name!r}]"
            )
        known = self._known_pool()
        if known is not None and not known.arena.is_closed:
            return known
        pool: Pool = self.store.pool_of(self.layout)
        self._known_pool = weakref.ref(pool)  # a pool that another replaces is not kept in memory
        return pool

    def in_pool(self, work: Callable[Concatenate[Pool, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run it in the pool; run it again if a new table replaced the pool meanwhile."""
        while True:
            known = self._known_pool()
            pool = self.pool if known is None or known.arena.is_closed or self.is_gone else known
            try:
                return work(pool, *args, **kwargs)
            except ClosedError:
                if pool is self.pool:  # which fails in a closed store
                    raise

    @property
    def learning_rate(self) -> float:
        """Of the next update: ``config.optimizer.lr`` at first; may be set to any finite number from 0 on. It is part
        of a commit. After ``tierstore.convert`` with a torch optimizer it is that one's, until it is set."""
        group = None if self.follows is None else self.follows()
        if group is not None:
            self.go_on_at(float(group["lr"]))
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if self.follows is not None and "initial_lr" in (self.follows() or {}):
            told = f"table {self.name!r} had the rate of a torch optimizer, whose schedule reaches it no more"
            warnings.warn(f"{told}: store.optimizer() has a rate for each table to schedule", RuntimeWarning, 2)
        self.go_on_at(rate)
        self.follows = None
        self.first_rate = self._learning_rate

    def go_on_at(self, rate: float) -> None:
        """Set the rate in force, by a schedule or from a commit."""
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"learning_rate={rate} must be finite and not negative")
        self._learning_rate = float(rate)

    def note_change(self) -> None:
        """Count one more change of its rows."""
        self.num_changes += 1

    def next_hyper(self) -> Hyper:
        """Count one more update and give its hyper-parameters."""
        self._step += 1
        self.num_changes += 1
        rate = self._learning_rate if self.follows is None else self.learning_rate
        return self.config.optimizer.hyper(rate, self._step)

    @property
    def rounding_seed(self) -> int:
        """The seed that the last counted update rounds with; see ``kernels.floats``."""
        if self.config.rounding == "nearest":
            return NEAREST
        return update_seed(self.config.init.random_seed, self._step)

    def id_error(self, row: int) -> ValueError:
        """The error for an id that is no row of the table."""
        return id_error(self.name, row, self.rows, "" if self.is_whole else " here, as the others are other ranks'")

    @property
    def is_whole(self) -> bool:
        """Whether all its rows are used in this store."""
        return len(self.rows) == self.config.num_rows

    def require_float(self) -> None:
        """ReadOnlyError if its rows are quantized."""
        if self.layout.is_quantized:
            raise ReadOnlyError(
                f"table {self.name!r} has {self.config.dtype} rows, which are looked up, not trained or written: "
                "change the rows it was quantized from, and quantize them again. Where only results are wanted, use "
                'torch.no_grad() or open the store with mode="r"'
            )


def id_error(name: str, row: int, rows: range, whose: str = "") -> ValueError:
    """The error for an id that is no row of the table of that name, or was none when it was read; ``whose``: why there
    are no others."""
    if row in rows:
        return IdError(
            f"an id was no row of table {name!r} when it was read, and is {row} now: its memory changed during the "
            "lookup; give each batch memory of its own"
        )
    return IdError(f"id {row} is not a row of table {name!r}: ids are in [{rows.start}, {rows.stop}){whose}")


def by_table(tables: Sequence[LookupTable], keys: Tensor, values: Tensor) -> list[RowGradients]:
    """Of rows by key, int64 [U], each table's."""
    if len(tables) == 1:
        return [RowGradients(tables[0], keys & ROW_MASK, values)]
    owners = keys >> KEY_ROW_BITS
    chosen = [owners == table.index for table in tables]
    return [RowGradients(table, keys[own] & ROW_MASK, values[own]) for table, own in zip(tables, chosen, strict=True)]


class AnyLookup(Protocol):
    """What modules and backward passes ask of a lookup, wherever its rows are.

    Attributes:
        joined: the ids; mode: how they are pooled.
        tables: those whose rows it trains, in order.
        holds: what keeps the ids of its rows, if they are dynamic.
    """

    joined: Joined
    mode: str
    tables: Any  # a sequence of ``LookupTable``
    holds: Sequence[Hold]

    @property
    def group(self) -> Hashable:
        """Equal of lookups that may be merged."""
        table = self.joined.tables[0]
        return table.store, table.layout, self.mode

    @abstractmethod
    def has_room(self) -> bool:
        """Whether ``stage`` would bring the rows in."""

    @abstractmethod
    def stage(self) -> bool:
        """Bring the rows in and hold them until used; False, and nothing is held, if the pool has no room."""

    @abstractmethod
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out`` (float32 [batch, columns], of any content, where the rows are). ``keep``: a
        backward follows, so it remembers arg-maxima, and holds the rows if there is room."""

    @abstractmethod
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale`` (numpy, float32 [ids of the batch]); before the
        update."""

    @abstractmethod
    def readied(self, grad_out: Tensor) -> Ready:
        """Bring its rows in, for an update, if they fit in memory together. Given float32 [batch, columns],
        C-contiguous."""

    @abstractmethod
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What an update would apply, of each table; several of one are to be added up in order. Rows stay as they are,
        and are released."""

    @abstractmethod
    def release(self) -> None:
        """Release the rows. It still works, but must bring them in again."""


class Lookup(AnyLookup):
    """A lookup in the fastest tier of the tables; errors as of ``pool.tier``."""

    def __init__(self, joined: Joined, *, mode: str) -> None:
        self.joined, self.tables, self.holds = joined, joined.tables, joined.holds
        self.mode = mode
        self._mode = kernels.MODES[mode]
        self._tier: Tier | None = None  # whose the lease is
        self._lease: Any = None
        self._arg_max: Any = None

    @classmethod
    def merged(cls, lookups: "Sequence[Lookup]", widths: Sequence[int]) -> "Lookup":
        """One lookup whose ``update`` trains the rows of several of one pool and mode after ``forward``, in their
        order, given their gradients flat, [1, B * C of all]; ``widths``: columns of each one's output."""
        joined = Joined.merged([lookup.joined for lookup in lookups], widths)
        made = cls(joined, mode=lookups[0].mode)
        made._arg_max = lookups[0]._arg_max
        if made._mode == kernels.MAX and joined.parts is not None:
            winners = joined.parts.winners([lookup._arg_max for lookup in lookups])
            made._arg_max = (torch.cat if isinstance(winners[0], Tensor) else np.concatenate)(winners)
        return made

    def _enter(self, pool: Pool) -> Tier:
        """The tier. A lease of a pool that was closed is dropped."""
        tier = pool.tier
        if tier is not self._tier:
            if self._lease is not None:
                self.release()
            self._tier = tier
        return tier

    def has_room(self) -> bool:
        found: bool = self.joined.tables[0].in_pool(lambda pool: self._enter(pool).has_room(self.joined))
        return found

    @shielded
    def stage(self) -> bool:
        if len(self.joined):
            self._lease = self.joined.tables[0].in_pool(lambda pool: self._enter(pool).stage(self.joined))
        return self._lease is not None or not len(self.joined)

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @shielded
    def forward(self, out: Tensor, *, keep: bool) -> None:
        self.joined.tables[0].in_pool(self._forward, out, keep)

    def _forward(self, pool: Pool, out: Tensor, keep: bool) -> None:
        tier = pool.tier
        if self._lease is None:
            self._tier = tier
        elif tier is not self._tier:
            self._enter(pool)
        self._lease, self._arg_max = tier.look_up(self.joined, self._mode, out, self._lease, keep=keep)
        if not keep and self._lease is not None:
            self.release()

    @shielded
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        joined = self.joined
        if len(joined):
            joined.scatter(self._enter(joined.tables[0].pool).dot(joined, grad_out, self._lease), grad_scale)

    @shielded
    def readied(self, grad_out: Tensor) -> Ready:
        joined = self.joined
        if not len(joined):
            self.release()  # the in-flight batch
            return Ready(joined.next_hyper, True)
        pool = joined.tables[0].pool
        if pool.tier is not self._tier:
            self._enter(pool)
        if self._lease is None or pool.tier.on_device:
            self._lease = joined.tables[0].in_pool(lambda pool: self._enter(pool).whole(joined, self._lease))
        return Ready(partial(self.update, grad_out), self._lease is not None)

    @shielded
    def update(self, grad_out: Tensor) -> None:
        """Backward and optimizer in one, by the gradient of the output, float32 [batch, columns], C-contiguous."""
        joined, hyper = self.joined, self.joined.next_hyper()
        pool = joined.tables[0].pool
        tier = pool.tier
        if tier is not self._tier:
            self._enter(pool)
        tier.update(joined, self._mode, hyper, grad_out, self._arg_max, self._lease)
        self.release()

    @shielded
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        tier = self._enter(self.joined.tables[0].pool)
        keys, values = tier.gradients(self.joined, self._mode, grad_out, self._arg_max)
        self.release()
        return by_table(self.tables, keys, values)


class DynamicLookup(AnyLookup):
    """Of tables with dynamic ids: which rows a batch has is known when it is looked up, not when it is prepared. It is
    of the ids that have rows, until ``admitted`` makes a lookup of one kind more. Errors as of ``Lookup``."""

    def __init__(self, batch: Joined, *, mode: str, make: Callable[[Joined], AnyLookup]) -> None:
        self.mode = mode
        self.tables: Sequence[LookupTable] = batch.tables
        self._batch = batch
        self._make = make

    @cached_property
    def _known(self) -> AnyLookup:
        return self._joined(Use.PREPARE)

    def _joined(self, use: Use) -> AnyLookup:
        def find(sought: Sequence[Sought]) -> Sequence[Found]:
            return [each.table.keys_of(each.ids, use) for each in sought]

        return self._make(with_rows(self._batch, find))

    def admitted(self) -> AnyLookup:
        """A lookup whose ids were admitted, for a forward pass that trains."""
        self.release()
        return self._joined(Use.ADMIT)

    @property
    def joined(self) -> Joined:  # type: ignore[override]
        return self._known.joined

    @property
    def holds(self) -> Sequence[Hold]:  # type: ignore[override]
        return self._known.holds

    def has_room(self) -> bool:
        return self._known.has_room()

    def stage(self) -> bool:
        return self._known.stage()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Of the ids that have rows now: since it was prepared, rows may have got other ids."""
        self.release()
        self._known = self._joined(Use.KEEP if keep else Use.READ)
        self._known.forward(out, keep=keep)

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        self._known.scale_gradient(grad_out, grad_scale)

    def readied(self, grad_out: Tensor) -> Ready:
        return self._known.readied(grad_out)

    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        return self._known.gradients(grad_out)

    def release(self) -> None:
        """What is looked up next is looked for again: ids may have got other rows."""
        if "_known" in self.__dict__:
            self.__dict__.pop("_known").release()


def make_lookup(joined: Joined, *, mode: str) -> AnyLookup:
    """A pooled lookup in the fastest tier of the tables. ValueError, which names table and id, for an id outside its
    table; where each row has a slot of its own, and in device memory, the lookup raises it."""
    if joined.has_dynamic_ids:
        return DynamicLookup(joined, mode=mode, make=partial(make_lookup, mode=mode))
    if joined.tables[0].pool.tier.reads_keys:
        joined.keys  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
