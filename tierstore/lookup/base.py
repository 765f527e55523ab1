"""Tables and lookups as their callers know them: what holds ids to their rows, gradients of rows, updates.

A lookup is used once: prepared (perhaps ahead, by the prefetch pipeline), run forward, and, if gradients are wanted,
run backward.
"""

import enum
import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from torch import Tensor

from ..config import TableConfig
from ..errors import ClosedError, IdError, ReadOnlyError, TableError
from ..kernels.arrays import Floats, Int64s
from ..kernels.floats import NEAREST, update_seed
from ..layout import KEY_ROW_BITS, ROW_MASK, RowLayout
from ..optim.configs import Hyper
from ..pool.joined import Joined
from ..pool.pool import Pool

_T = TypeVar("_T")
_P = ParamSpec("_P")
_TWICE: Final = (
    "a batch is trained a second time (retain_graph=True), and some ids have lost their rows since the first: run the "
    "backward passes of a batch before the next batch's forward"
)


class Use(enum.Enum):
    """Why rows of dynamic ids are looked up."""

    PREPARE = enum.auto()  # to bring them in; ids without a row are no error
    READ = enum.auto()
    KEEP = enum.auto()  # a backward follows: they keep their ids until then
    ADMIT = enum.auto()  # so too, and they will be trained: ids count, and get rows by the table's rules


class Hold:
    """Keeps the ids of a batch's ``rows``, int64 [n] and -1, as long as somebody refers to it. ``num_moves``: how often
    rows of the table have lost their ids."""

    def __init__(self, rows: Int64s, num_moves: Callable[[], int]) -> None:
        self.rows = rows
        self._num_moves = num_moves
        self._moves_when_let_go: int | None = None

    def let_go(self) -> None:
        """Keep them no longer: the batch has been trained."""
        self.rows, self._moves_when_let_go = self.rows[:0], self._num_moves()

    def require(self, why: str = _TWICE) -> None:
        """RuntimeError if they were let go of, and some ids have lost their rows since."""
        if self._moves_when_let_go is not None and self._moves_when_let_go < self._num_moves():
            raise RuntimeError(why)


class Found(NamedTuple):
    """int64 [n]: keys of the rows of some ids, -1 of one that has none."""

    keys: Int64s
    hold: Hold | None = None


class LookupTable(ABC):
    """A table as lookups know it: where its rows are now, and how they are trained.

    Attributes:
        store: the ``store.Store`` that it is of.
        config: its configuration.
        index: its number in the store.
        layout: how its rows lie in memory.
        rows: the rows that this store uses; all, but for tables that are sharded over processes. To be set before the
            first use.
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
        self._hyper: Hyper | None = None

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
        rate, rule = self._learning_rate if self.follows is None else self.learning_rate, self.config.optimizer
        known = self._hyper
        if known is None or known[0] != rate or rule.goes_by_step:
            self._hyper = known = rule.hyper(rate, self._step)
        return known

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
