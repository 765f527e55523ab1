"""A batch as pools take it: the ids of some features laid end to end, as row keys or as slots, and their bags."""

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..kernels import slots as kernels
from ..kernels.arrays import Bools, Floats, Ids, Int32s, Int64s, Words
from ..kernels.hashing import SECRET
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..optim.configs import Hyper

NO_INTS: Final = np.empty(0, np.int32)
NO_FLOATS: Final = np.empty(0, np.float32)
NO_ARG_MAX: Final = np.empty((0, 0), np.int32)
_INT32_MAX: Final = 2**31 - 1
_next_hyper: Final[Any] = operator.methodcaller("next_hyper")


class Numbering(Protocol):
    """Slots where row r of a table is in slot ``first + r``."""

    def first_slots(self, table_indices: Int64s) -> Int64s:
        """int64 [n], the slots of these tables' rows 0."""


Read = Callable[[Numbering | None, NDArray[Any]], None]
"""Puts slots (int32 [N]), or without a numbering keys (int64 [N]), into an array."""


class Features:
    """Features that one lookup serves, the same in each batch; those of one table are neighbours."""

    def __init__(self, tables: list[Any], bounds: ArrayLike, columns: Ids) -> None:
        self.tables = tables  # distinct, all in one pool
        self.bounds = np.asarray(bounds, np.int64)  # int64 [tables + 1], the features of each
        self.columns = columns  # int32 or int64 [features], where results begin in a row of the output
        self.table_indices = np.array([table.index for table in tables], np.int64)  # their places in the store
        # int32 [features], which of ``tables`` each one's is
        self.table_of = np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(self.bounds))
        self._rules: tuple[list[Hyper], Int64s, Floats] | None = None

    @classmethod
    def of(cls, owners: Sequence[Any], columns: ArrayLike) -> "Features":
        """Those of these tables, one for each feature."""
        bounds = [i for i, table in enumerate(owners) if not i or table is not owners[i - 1]]
        return cls(list(dict.fromkeys(owners)), [*bounds, len(owners)], np.asarray(columns, np.int32))

    @cached_property
    def indices(self) -> Int64s:
        """int64 [features], its table's place in the store."""
        return self.table_indices[self.table_of]

    @cached_property
    def first_keys(self) -> Int64s:
        """int64 [features], the key of row 0 of its table."""
        return self.indices << KEY_ROW_BITS

    @cached_property
    def has_dynamic_ids(self) -> bool:
        return any(table.config.ids is not None for table in self.tables)

    @cached_property
    def round_to_nearest(self) -> bool:
        return all(table.config.rounding == "nearest" for table in self.tables)

    def rules(self, hyper: list[Hyper]) -> tuple[Int64s, Floats]:
        """The code of each table's optimizer, int64 [tables], and its hyper-parameters, float32 [tables, NUM_HYPER]."""
        known = self._rules
        if known is None or known[0] != hyper:
            codes = np.array([table.config.optimizer.code for table in self.tables], np.int64)
            self._rules = known = hyper, codes, np.array(hyper, np.float32)
        return known[1:]

    @cached_property
    def num_rows(self) -> Int64s:
        return np.array([table.config.num_embeddings for table in self.tables], np.int64)[self.table_of]


class Bags:
    """The bags of a batch, feature by feature."""

    def __init__(self, starts: Any, columns: Ids, batch: int, scale: Floats = NO_FLOATS) -> None:
        self.starts = starts  # int64 or int32 [K + 1], where each begins in what is laid end to end
        self.columns = columns  # int32 or int64 [F], where the results of each feature begin in a row of the output
        self.batch = batch  # bags of a feature
        self.scale = scale  # float32 [N], per-sample weights, or empty


class Joined(Bags):
    """The ids of some features laid end to end, as row keys or as slots.

    The caller's ids are read once: later changes of their memory reach neither keys nor slots.

    Args:
        starts: kept, so nobody may change it.
        ids: of the batch, and where those of each feature begin and end there, int64 [features].
        keys: int64 [N], if they are known.
        places: int64 [N], where the value of each position belongs in ``scatter``; None: where ``ids`` have it.
        read: reads rows, unless they are ``ids`` or keys.
    """

    tier: Any = None  # in device memory, which has sent it there
    sent: Any = None  # what it has there
    parts: "Parts | None" = None  # what it was merged from
    has_dynamic_ids = False  # which are no rows yet; ``lookup.lookup`` finds these
    holds: Sequence[Any] = ()  # what keeps the ids of its rows, if they are dynamic
    dynamic_ids: tuple[Int64s, Bools] | None = None  # those that were looked for, and which of them have rows
    unseen: Any = None  # ids that have none, and count

    def __init__(
        self, features: Features, batch: int, starts: Any, scale: Floats = NO_FLOATS, *,
        ids: tuple[Ids, Int64s, Int64s] | None = None, keys: Int64s | None = None, places: Int64s | None = None,
        read: Read | None = None,
    ) -> None:  # fmt: skip
        self.starts, self.columns, self.batch, self.scale = starts, features.columns, batch, scale
        self.features = features
        self.tables = features.tables
        self.has_dynamic_ids = ids is not None and keys is None and features.has_dynamic_ids
        self._ids: Any = ids
        self._keys = keys
        self._places = places
        self._read_rows = read
        self._slots: Any = None
        self._numbering: Numbering | None = None

    @classmethod
    def of_keys(cls, tables: Sequence[Any], keys: Int64s) -> "Joined":
        """Rows by key, int64 [n], in any order: a bag for each, its result where the caller has the key, in a flat
        output. Each is of one of the tables, which are distinct and of one pool."""
        indices = [table.index for table in tables]
        places = np.zeros(max(indices) + 1, np.int64)
        places[indices] = np.arange(len(indices))
        table_of = places[keys >> KEY_ROW_BITS]
        order: Any = np.argsort(table_of, kind="stable")
        bounds = np.searchsorted(table_of[order], np.arange(len(tables) + 1))
        features = Features(list(tables), bounds, order * tables[0].layout.dim)
        return cls(features, 1, np.arange(len(keys) + 1), keys=keys[order])

    @classmethod
    def merged(cls, joined: "Sequence[Joined]", widths: Sequence[int]) -> "Joined":
        """Positions of several lookups of one pool, pooled alike, table by table, within a table in the order of the
        lookups, so that backward merges each row once. It has one bag a "feature", and the output is that of all
        lookups, flat, end to end; ``widths``: columns of each one's."""
        tables = list(dict.fromkeys(table for each in joined for table in each.tables))
        pieces, table_bags = _pieces(tables, joined)
        parts = Parts(joined, pieces)
        sizes = np.concatenate(parts.over_bags([np.diff(each.starts) for each in joined]))
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        scale = NO_FLOATS
        if any(len(each.scale) for each in joined):
            scales = [each.scale if len(each.scale) else np.ones(len(each), np.float32) for each in joined]
            scale = np.concatenate(parts.over_positions(scales))
        columns = np.concatenate(parts.over_bags(_places(joined, widths)))
        made = cls(Features(tables, table_bags, columns), 1, starts, scale, read=parts.read)
        made.parts = parts
        made.holds = [hold for each in joined for hold in each.holds]
        return made

    def __len__(self) -> int:
        return self.starts.item(-1)  # type: ignore[no-any-return]

    @property
    def num_bags(self) -> int:
        return len(self.columns) * self.batch

    @property
    def bounds(self) -> Int64s:
        """int64 [tables + 1], the bags of each table."""
        return self.features.bounds * self.batch

    @property
    def table_of(self) -> Int32s:
        """int32 [features], which of ``tables`` each one's is."""
        return self.features.table_of

    @property
    def table_of_feature(self) -> Sequence[Any]:
        return [self.tables[place] for place in self.table_of.tolist()]

    @property
    def is_read(self) -> bool:
        """The caller's ids were read, and may have changed since."""
        return self._keys is not None or self._numbering is not None

    @property
    def keys(self) -> Int64s:
        """int64 [N], row keys. ValueError, which names table and id, for an id outside its table."""
        if self._keys is None:
            known = self._numbering
            if known is None:
                keys = np.empty(int(self.starts[-1]), np.int64)
                self._read(None, keys)
            else:
                keys = self._slots + self._shifts(known)
            self._keys = keys
        return self._keys

    def _shifts(self, numbering: Numbering) -> Int64s:
        """int64 [N]: by how much the key of each position is above its slot."""
        indices = self.features.table_indices
        shifts = (indices << KEY_ROW_BITS) - numbering.first_slots(indices)
        return np.repeat(shifts, np.diff(self.starts[self.bounds]))

    @cached_property
    def distinct(self) -> tuple[Int32s, Int64s]:
        """The number of each position's row, int32 [N], and the rows' keys, int64 [U], by first position. For batches
        that no admission has numbered: those of which rows cross between ranks, or do not fit in memory."""
        keys = self.keys
        inverse, unique_keys = np.empty(len(keys), np.int32), np.empty_like(keys)
        scratch = np.full(1 << (2 * len(keys) - 1).bit_length(), -1, np.int32)
        count = kernels.unique_in_order(keys, scratch, unique_keys, inverse, SECRET)
        return inverse, unique_keys[:count]

    def order_of_use(self) -> Int32s:
        """int32 [N]: the positions sample by sample, so that rows used by one sample lie together when they have left
        memory; empty where that is their own order, or no row will be written."""
        if not 1 < self.batch < len(self.starts) - 1 or self.tables[0].store.readonly:
            return NO_INTS
        order = np.empty(int(self.starts[-1]), np.int32)
        kernels.order_by_sample(self.starts, self.batch, order)
        return order

    def slots(self, numbering: Numbering) -> Int32s:
        """int32 [N], slots where each row has its own; errors as ``keys``."""
        if self._numbering is not numbering:
            slots = np.empty(len(self), np.int32)
            self.write(numbering, slots)
            self.note_slots(slots, numbering)
        known: Int32s = self._slots
        return known

    def write(self, numbering: Numbering | None, out: NDArray[Any]) -> None:
        """Slots into ``out`` (int32 [N]), or without a numbering keys (int64 [N]), which are not kept; errors as
        ``keys``."""
        if not self.is_read:
            self._read(numbering, out)
        elif numbering is None:
            out[:] = self.keys
        elif numbering is self._numbering:
            out[:] = self._slots
        else:
            np.subtract(self.keys, self._shifts(numbering), out=out, casting="same_kind")

    def note_keys(self, keys: Int64s) -> None:
        """Take over what ``keys`` would find: the caller's ids may have changed since they were read."""
        self._keys = keys

    def note_slots(self, slots: Int32s, numbering: Numbering) -> None:
        self._slots, self._numbering = slots, numbering

    def _read(self, numbering: Numbering | None, out: NDArray[Any]) -> None:
        if self._read_rows is not None:
            self._read_rows(numbering, out)
            return
        join: Any = kernels.join_ids
        bad = join(0, len(self.starts) - 1, *self.ids_of_bags(numbering), out)
        if bad >= 0:
            self.check([bad])

    def ids_of_bags(self, numbering: Numbering | None) -> tuple[Ids, Int64s, Int64s, Int64s, int, Ids]:
        """What ``kernels.look_up`` and, without a numbering, ``kernels.join_ids`` take behind the range of bags: the
        ids, where each feature's begin, the slot or key of its row 0, its table's rows, bags of a feature, and
        ``starts``."""
        features, starts = self.features, self.starts
        if self._ids is None:  # the rows that dynamic ids have
            ids, first = self.keys & ROW_MASK, starts[np.arange(len(self.columns)) * self.batch]
        else:
            ids, first, _ = self._ids
        firsts = features.first_keys
        if numbering is not None:
            firsts = numbering.first_slots(features.indices)
        return ids, first, firsts, features.num_rows, self.batch, starts

    def check(self, positions: Sequence[int]) -> None:
        """Raise ValueError if one of them is the position of an id outside its table."""
        bad = [position for position in positions if position >= 0]
        if bad:
            ids, starts, stops = self._ids
            for table, start, stop in zip(self.table_of_feature, starts.tolist(), stops.tolist(), strict=True):
                own = [position for position in bad if start <= position < stop]
                if own:
                    raise table.id_error(int(ids[min(own)]))

    def scatter(self, values: Floats, out: Floats) -> None:
        """Add a value of each position to ``out``, float32 [ids of the batch], where its id came from."""
        if self._places is not None:
            out[self._places] += values
            return
        place = 0
        for start, stop in zip(*(bounds.tolist() for bounds in self._ids[1:]), strict=True):
            out[start:stop] += values[place : place + stop - start]
            place += stop - start

    def origin(self, position: int) -> "tuple[Joined, int]":
        """What joined the id of a position, and its position there: of what was merged one of its parts."""
        for piece in () if self.parts is None else self.parts.pieces:
            if piece.positions.start <= position - piece.shift < piece.positions.stop:
                return self.parts.joined[piece.lookup].origin(position - piece.shift)  # type: ignore[union-attr]
        return self, position

    def require_trainable(self) -> None:
        """ReadOnlyError for tables of quantized rows; all are of one layout. RuntimeError: ids have lost rows since it
        was trained."""
        self.tables[0].require_float()
        for hold in self.holds:
            hold.require()

    def next_hyper(self) -> list[Hyper]:
        """Count one more update of each table: its hyper-parameters."""
        return list(map(_next_hyper, self.tables))

    def rounding_seeds(self) -> Words:
        """Seeds of ``kernels.floats`` for the update counted last, uint64 [tables]; of tables that do not all round to
        nearest."""
        return np.array([table.rounding_seed for table in self.tables], np.uint64)


class Jagged(NamedTuple):
    """Checked ids of many features, key-major: all bags of feature 0, then all of feature 1, ..."""

    ids: Ids  # int64 or int32 [N]
    offsets: Ids  # int64 or int32 [features * batch + 1]
    batch: int  # bags of each feature
    scale: Floats | None = None  # float32 [N], per-sample weights

    def of(self, batch: int) -> "Jagged":
        return self._replace(batch=batch)

    @property
    def on_host(self) -> "Jagged":
        """Itself; ``lookup.lookup.DeviceJagged`` copies."""
        return self

    def join(self, features: Features, places: Sequence[int]) -> Joined:
        """The ids of some features; ``places``: which of these each of them is."""
        batch = self.batch
        starts: Any = self.offsets
        if places == list(range((len(starts) - 1) // max(batch, 1))):
            ends = starts[:: max(batch, 1)].astype(np.int64)
            begins, stops = ends[:-1], ends[1:]
        else:  # the chosen ones, laid end to end
            lists = starts[np.add.outer(np.asarray(places) * batch, np.arange(batch + 1))]
            begins, stops = lists[:, 0].astype(np.int64), lists[:, -1].astype(np.int64)
            sizes = stops - begins
            shifts = np.cumsum(sizes) - sizes - begins
            starts = np.append((lists[:, :-1] + shifts[:, None]).ravel(), sizes.sum()).astype(starts.dtype, copy=False)
        scale = NO_FLOATS
        if self.scale is not None:
            pairs = zip(begins.tolist(), stops.tolist(), strict=True)
            scale = np.concatenate([NO_FLOATS, *(self.scale[begin:stop] for begin, stop in pairs)])
        return Joined(features, batch, starts, scale, ids=(self.ids, begins, stops))


class _Piece(NamedTuple):
    """Of one lookup, the bags and positions of one table, and how far its positions move."""

    lookup: int
    bags: slice
    positions: slice
    shift: int


class Parts(NamedTuple):
    """What was merged: what each lookup joined, and the pieces in order."""

    joined: Sequence[Joined]
    pieces: list[_Piece]

    def read(self, numbering: Numbering | None, out: NDArray[Any]) -> None:
        rows = [each.keys if numbering is None else each.slots(numbering) for each in self.joined]
        np.concatenate(self.over_positions(rows), out=out)

    def over_bags(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Of an array over the bags of each lookup, those over the bags of all, in pieces."""
        return [arrays[piece.lookup][piece.bags] for piece in self.pieces]

    def over_positions(self, arrays: Sequence[Any]) -> list[Any]:
        """Likewise of an array or tensor over positions."""
        return [arrays[piece.lookup][piece.positions] for piece in self.pieces]

    def winners(self, arg_max: Sequence[Any]) -> list[Any]:
        """Of the positions that gave each lookup's maxima (array or tensor [bags, dim]), those of the bags of all."""
        return [arg_max[piece.lookup][piece.bags] + piece.shift for piece in self.pieces]


def _pieces(tables: Sequence[Any], joined: Sequence[Joined]) -> tuple[list[_Piece], list[int]]:
    """The pieces in order; the first bag of each table, and the end of the last."""
    places = [{table: place for place, table in enumerate(each.tables)} for each in joined]
    pieces = []
    table_bags, num_positions = [0], 0
    for table in tables:
        num_bags = table_bags[-1]
        for number, (each, place_of) in enumerate(zip(joined, places, strict=True)):
            if table in place_of:
                begin, end = each.bounds[place_of[table] : place_of[table] + 2].tolist()
                first, last = each.starts[[begin, end]].tolist()
                pieces.append(_Piece(number, slice(begin, end), slice(first, last), num_positions - first))
                num_bags += end - begin
                num_positions += last - first
        table_bags.append(num_bags)
    return pieces, table_bags


def _places(joined: Sequence[Joined], widths: Sequence[int]) -> list[NDArray[Any]]:
    """Where the result of each bag begins in the outputs laid end to end: for each lookup an array [bags]."""
    sizes = [each.batch * width for each, width in zip(joined, widths, strict=True)]
    dtype = np.int32 if sum(sizes) <= _INT32_MAX else np.int64
    starts = np.cumsum(sizes) - sizes
    return [
        (np.add.outer(each.columns.astype(np.int64), np.arange(each.batch) * width).ravel() + start).astype(dtype)
        for each, width, start in zip(joined, widths, starts.tolist(), strict=True)
    ]
