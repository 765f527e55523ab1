"""The contracts of tables and stores, as lookups use them."""

import enum
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import IdError
from ..hbm.checks import Captured
from ..kernels.arrays import Int64s
from ..kernels.threads import Workers
from ..layout import KEY_ROW_BITS, ROW_MASK, RowLayout
from ..optim.configs import Hyper
from ..pool import Pool

_T = TypeVar("_T")


class RowGradients(NamedTuple):
    """Merged gradients of a table's rows: int64 [U], distinct, and float32 [U, dim], on the store's device."""

    table: "LookupTable"
    rows: Tensor
    values: Tensor


class Ready(NamedTuple):
    """An update whose rows are in: ``train`` makes it, and releases them. Unless it ``is_whole``, it brings rows in
    part by part."""

    train: Callable[[], None]
    is_whole: bool


class TrainsRows(Protocol):
    """A lookup after forward."""

    @property
    def tables(self) -> "Sequence[LookupTable]":
        """Those whose rows it trains, in order."""

    @property
    def holds(self) -> "Sequence[Hold]":
        """What keeps the ids of its rows, if they are dynamic."""

    @abstractmethod
    def readied(self, grad_out: Tensor) -> "Ready":
        """Bring its rows in, for an update, if they fit in memory together. Given float32 [batch, columns],
        C-contiguous."""

    @abstractmethod
    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        """What an update would apply, of each table; several of one are to be added up in order. Rows stay as they are,
        and are released."""

    @abstractmethod
    def release(self) -> None:
        """Release the rows. It still works, but must bring them in again."""


class CollectsGradients(Protocol):
    """A store's optimizer, as a backward pass sees it."""

    def collect(self, lookup: TrainsRows, grad_out: Tensor) -> None:
        """Keep what training ``lookup`` by ``grad_out`` would apply, until the optimizer's step."""


class Use(enum.Enum):
    """What rows of dynamic ids are looked for, for."""

    PREPARE = enum.auto()
    """To bring them in; ids without a row are no error."""
    READ = enum.auto()
    KEEP = enum.auto()
    """A backward follows: they keep their ids until then."""
    ADMIT = enum.auto()
    """So too, and they will be trained: ids count, and get rows by the table's rules."""


class Hold(Protocol):
    """Keeps the ids of a batch's rows as long as somebody refers to it."""

    def let_go(self) -> None:
        """Keep them no longer: the batch has been trained."""

    def require(self) -> None:
        """RuntimeError if they were let go of, and some ids have lost their rows since."""


class Found(NamedTuple):
    """int64 [n]: keys of the rows of some ids, -1 of one that has none."""

    keys: Int64s
    hold: Hold | None = None


class Sought(NamedTuple):
    """Ids of a batch in one table with dynamic ids, feature after feature.

    Attributes:
        ids: int64 [n].
        ends: int64 [features], where each feature's end.
    """

    table: "LookupTable"
    ids: Int64s
    ends: Int64s


Find = Callable[[Sequence[Sought]], Sequence[Found]]
"""Finds the rows of each table's ids."""


class LookupStore(Protocol):
    """The store that a table is of."""

    @property
    def optimizer_in_use(self) -> CollectsGradients | None:
        """Who collects gradients; None: backward updates rows."""

    @property
    def device(self) -> torch.device:
        """Where results live."""

    @property
    def readonly(self) -> bool:
        """Whether no row is trained or written."""

    @property
    def workers(self) -> Workers: ...

    def note_partly_trained(self, error: BaseException) -> None:
        """A step failed after some of its rows were, or may have been, trained."""

    def require_whole_steps(self) -> None:
        """Raises PartlyTrainedError after that."""


class LookupTable(Protocol):
    """A table whose rows are looked up and trained."""

    config: TableConfig
    index: int
    layout: RowLayout

    @property
    def num_changes(self) -> int:
        """How often rows were updated, written or exchanged."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> LookupStore: ...

    @property
    def pool(self) -> Pool:
        """Where its rows live now; raises ClosedError or TableError if they no longer do."""

    def in_pool(self, work: Callable[[Pool], _T]) -> _T:
        """Run it in the pool; run it again if a new table replaced the pool meanwhile."""

    @property
    def rounding_seed(self) -> int:
        """Rounding seed of the last counted update."""

    def next_hyper(self) -> Hyper:
        """Count one more update: its hyper-parameters."""

    def replayed_hyper(self, captured: Captured) -> Hyper:
        """The hyper-parameters of an update in a CUDA graph, which counts its replays. RuntimeError if they change from
        one update to the next."""

    def id_error(self, row: int) -> ValueError:
        """The error for an id that is not a row."""

    def keys_of(self, ids: Int64s, use: Use) -> Found:
        """Of the rows of these ids; errors as ``id_error``."""

    def require_float(self) -> None:
        """Raises ReadOnlyError if its rows are quantized."""


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
