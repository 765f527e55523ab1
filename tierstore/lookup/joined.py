"""The positions of a batch: ids laid end to end, as row keys or as slots. However it is built, it is one record."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..hbm.base import POSITIONS_MAX, DeviceBatch, DeviceRows, rows_of
from ..hbm.batch import DeviceIds
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s, Words
from ..kernels.floats import NEAREST
from ..layout import KEY_ROW_BITS, ROW_MASK
from ..optim.configs import Hyper
from ..pool.backward import Groups
from ..pool.bags import NO_FLOATS, Bags, Batch, Distinct, Features, IdsOfBags, Numbering
from .tables import Find, Hold, LookupTable, Sought, TrainsRows
from .unseen import Unseen

_INT32_MAX: Final = 2**31 - 1
Read = Callable[[Numbering | None, NDArray[Any]], None]
"""Puts slots (int32 [N]), or without a numbering keys (int64 [N]), into an array."""


class Joined:
    """The ids of some features laid end to end, as row keys or as slots.

    Made by ``Jagged.join`` and ``DeviceJagged.join``, ``of_keys`` and ``merged``.

    Args:
        starts: int64 or int32 [features * batch + 1], where each bag begins in what is laid end to end; kept, so nobody
            may change it.
        scale: float32 [N], per-sample weights, or empty.
        ids: of the batch, and where those of each feature begin and end there, int64 [features].
        keys: int64 [N], if they are known.
        places: int64 [N], where the value of each position belongs in ``scatter``; None: where ``ids`` have it.
        read: reads rows, unless they are ``ids`` or keys.
    """

    sent: DeviceBatch | None = None  # the batch on the device, in terms of ``rows``, if it was joined there
    rows: DeviceRows | None = None
    parts: "Parts | None" = None  # what it was merged from
    holds: Sequence[Hold] = ()  # what keeps the ids of its rows, if they are dynamic
    unseen: Unseen | None = None  # ids that have none, and count

    def __init__(
        self, features: Features, batch: int, starts: Any, scale: Floats = NO_FLOATS, *,
        ids: tuple[Ids, Int64s, Int64s] | None = None, keys: Int64s | None = None, places: Int64s | None = None,
        read: Read | None = None,
    ) -> None:  # fmt: skip
        self.features = features
        self.tables: list[LookupTable] = features.tables
        self.batch = batch
        self._ids: Any = ids
        self._keys = keys
        self._places = places
        self._read_rows = read
        self._slots: Any = None
        self._numbering: Numbering | None = None
        self.bags: Bags = Bags(
            features.table_indices, features.table_of, features.bounds * batch, starts, features.columns, batch, scale
        )

    @classmethod
    def of_keys(cls, tables: Sequence[LookupTable], keys: Int64s) -> "Joined":
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
        sizes = np.concatenate(parts.over_bags([np.diff(each.bags.starts) for each in joined]))
        starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        scale = NO_FLOATS
        if any(len(each.bags.scale) for each in joined):
            scale = np.concatenate(parts.over_positions([_scale(each) for each in joined]))
        columns = np.concatenate(parts.over_bags(_places(joined, widths)))
        made = cls(Features(tables, table_bags, columns), 1, starts, scale, read=parts.read)
        made.parts = parts
        made.holds = [hold for each in joined for hold in each.holds]
        return made

    def of_rows(self, find: Find) -> "Joined":
        """Of tables with dynamic ids: what of it has rows by ``find``. Other ids are left out of their bags; if they
        count, they are in ``unseen``."""
        given, begins, ends = self._ids
        places = np.concatenate([np.arange(*each) for each in zip(begins.tolist(), ends.tolist(), strict=True)])
        ids = given[places].astype(np.int64, copy=False)
        features, begins = self.features, self.bags.starts[np.arange(len(self.features.columns) + 1) * self.batch]
        bounds = [begins[low : high + 1] for low, high in itertools.pairwise(features.bounds.tolist())]
        parts = zip(self.tables, bounds, strict=True)
        found = find([Sought(table, ids[own[0] : own[-1]], own[1:] - own[0]) for table, own in parts])
        keys = np.concatenate([each.keys for each in found])
        starts, scale, has_row, unseen = self.bags.starts, self.bags.scale, keys >= 0, None
        if not has_row.all():
            starts = np.append(0, np.cumsum(has_row))[starts]
            count = np.repeat([table.config.counts_unseen for table in self.tables], [len(each.keys) for each in found])
            if len(lost := np.flatnonzero(count & ~has_row)):
                unseen = Unseen(self.tables, self.bags, lost, ids[lost], places[lost], np.diff(starts))
            keys, places, scale = keys[has_row], places[has_row], scale[has_row[: len(scale)]]
        made = Joined(self.features, self.batch, starts, scale, keys=keys, places=places)
        made.holds = [each.hold for each in found if each.hold is not None]
        made.unseen = unseen
        return made

    def __len__(self) -> int:
        return int(self.bags.starts[-1])

    @property
    def num_bags(self) -> int:
        return len(self.features.columns) * self.batch

    # The caller's ids are read once: later changes of their memory reach neither keys nor slots.

    @property
    def is_read(self) -> bool:
        """Whether the caller's ids were read: they may have changed since."""
        return self._keys is not None or self._numbering is not None

    @property
    def keys(self) -> Int64s:
        """int64 [N], row keys. ValueError, which names table and id, for an id outside its table."""
        if self._keys is None:
            known = self._numbering
            if known is None:
                keys = np.empty(int(self.bags.starts[-1]), np.int64)
                self._read(None, keys)
            else:
                keys = self._slots + self.bags.shifts(known)
            self._keys = keys
        return self._keys

    @cached_property
    def distinct(self) -> Distinct:
        return Distinct.of(self.keys)

    @cached_property
    def keyed(self) -> Batch:
        """The batch as a pool takes it whose rows may be evicted; errors as ``keys``.

        Sample by sample: rows used by one sample lie together when they have left memory. It plays no part where no row
        will be written.
        """
        by_sample = 1 < self.batch < len(self.bags.starts) - 1 and not self.tables[0].store.readonly
        return Batch(self.bags, self.keys, by_sample)

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
            np.subtract(self.keys, self.bags.shifts(numbering), out=out, casting="same_kind")

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
        bad = join(0, len(self.bags.starts) - 1, *self.ids_of_bags(numbering), out)
        if bad >= 0:
            self.check([bad])

    def ids_of_bags(self, numbering: Numbering | None) -> IdsOfBags:
        """What ``kernels.look_up`` and, without a numbering, ``kernels.join_ids`` take behind the range of bags."""
        features, starts = self.features, self.bags.starts
        if self._ids is None:  # the rows that dynamic ids have
            ids, first = self.keys & ROW_MASK, starts[np.arange(len(features.columns)) * self.batch]
        else:
            ids, first, _ = self._ids
        firsts = features.indices << KEY_ROW_BITS if numbering is None else numbering.first_slots(features.indices)
        return IdsOfBags(ids, first, firsts, features.num_rows, self.batch, starts)

    def check(self, positions: list[int]) -> None:
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

    def require_trainable(self) -> None:
        """ReadOnlyError for tables of quantized rows; all are of one layout. RuntimeError: ids have lost rows since it
        was trained."""
        self.tables[0].require_float()
        for hold in self.holds:
            hold.require()

    def groups(self, arg_max: Int32s, num_columns: int, *, is_mean: bool) -> Groups:
        """Its positions, to be grouped by row, for an output of so many columns; ``arg_max``: int32 [bags, dim], or
        empty."""
        return Groups(self.bags, arg_max, num_columns, self.tables[0].store.workers, is_mean=is_mean)

    @property
    def table_of_feature(self) -> Sequence[LookupTable]:
        return [self.tables[place] for place in self.features.table_of.tolist()]

    def next_hyper(self) -> list[Hyper]:
        """Count one more update of each table: its hyper-parameters."""
        return [table.next_hyper() for table in self.tables]

    def rounding_seeds(self) -> Words | None:
        """What the update counted last rounds with (``rounding``), uint64 [tables]; None if to nearest everywhere."""
        seeds = [table.rounding_seed for table in self.tables]
        return None if seeds.count(NEAREST) == len(seeds) else np.array(seeds, np.uint64)


class Unjoined(NamedTuple):
    """A batch of some features, of tables with dynamic ids, before its ids are rows."""

    features: Features
    join: Callable[[Find], Joined]


class AnyLookup(TrainsRows, Protocol):
    """What modules and backward passes ask of a lookup, wherever its rows are."""

    joined: Joined  # the ids
    mode: str  # how they are pooled

    @property
    def group(self) -> Hashable:
        """Equal of lookups that may be merged."""
        table = self.joined.tables[0]
        return table.store, table.layout, self.mode

    @property
    def tables(self) -> Sequence[LookupTable]:
        return self.joined.tables

    @property
    def holds(self) -> Sequence[Hold]:
        return self.joined.holds

    @abstractmethod
    def has_room(self) -> bool:
        """Whether ``stage`` would bring the rows in."""

    @abstractmethod
    def stage(self) -> bool:
        """Bring the rows in and hold them until used; False, and nothing is read, if the pool has no room."""

    @abstractmethod
    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out``."""

    @abstractmethod
    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale``."""


class Jagged(NamedTuple):
    """Ids of many features, key-major: all bags of feature 0, then all of feature 1, ..."""

    ids: Ids  # int64 or int32 [N]
    offsets: Ids  # int64 or int32 [features * batch + 1]
    batch: int  # bags of each feature
    scale: Floats | None = None  # float32 [N], per-sample weights

    def of(self, batch: int) -> "Jagged":
        return self._replace(batch=batch)

    def padded(self, strides: Sequence[int]) -> "Jagged":
        """Of features with so many bags each: with empty ones behind, as many of each."""
        batch, own = max(strides, default=0), np.array(strides, np.int64)
        firsts = np.cumsum(own) - own
        starts = self.offsets[firsts[:, None] + np.minimum(np.arange(batch), own[:, None])]
        return self._replace(offsets=np.append(starts.ravel(), self.offsets[-1:]), batch=batch)

    @property
    def on_host(self) -> "Jagged":
        """Itself; ``DeviceJagged`` copies."""
        return self

    def join(self, features: Features, places: Sequence[int]) -> "Joined | Unjoined":
        """The ids of some features; ``places``: which of these each of them is."""
        if features.has_dynamic_ids:
            return Unjoined(features, lambda find: self._join(features, places).of_rows(find))
        return self._join(features, places)

    def _join(self, features: Features, places: Sequence[int]) -> Joined:
        batch = self.batch
        starts: Any = self.offsets
        if places == list(range((len(starts) - 1) // max(batch, 1))):
            ends = starts[np.arange(len(places) + 1) * batch].astype(np.int64)
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


def _pieces(tables: Sequence[LookupTable], joined: Sequence[Joined]) -> tuple[list[_Piece], list[int]]:
    """The pieces in order; the first bag of each table, and the end of the last."""
    places = [{table: place for place, table in enumerate(each.tables)} for each in joined]
    pieces = []
    table_bags, num_positions = [0], 0
    for table in tables:
        num_bags = table_bags[-1]
        for number, (each, place_of) in enumerate(zip(joined, places, strict=True)):
            if table in place_of:
                begin, end = each.bags.bounds[place_of[table] : place_of[table] + 2].tolist()
                first, last = each.bags.starts[[begin, end]].tolist()
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
        (np.add.outer(each.bags.columns.astype(np.int64), np.arange(each.batch) * width).ravel() + start).astype(dtype)
        for each, width, start in zip(joined, widths, starts.tolist(), strict=True)
    ]


def _scale(joined: Joined) -> Floats:
    return joined.bags.scale if len(joined.bags.scale) else np.ones(len(joined), np.float32)


class DeviceJagged:
    """A ``Jagged`` whose tensors are on a device. ``to_host`` copies them, checked, and waits; ``offsets_error``: the
    error for a wrong offset, given its index."""

    def __init__(
        self, given: DeviceIds, num_bags: int, to_host: Callable[[], Jagged], offsets_error: Callable[[int], ValueError]
    ) -> None:
        self.given = given
        self.batch = self._num_bags = num_bags
        self.offsets_error = offsets_error
        self._to_host = to_host

    def of(self, batch: int) -> "DeviceJagged":
        self.batch = batch
        return self

    @cached_property
    def on_host(self) -> Jagged:
        """A copy; waits for the device."""
        return self._to_host()._replace(batch=self.batch)

    def join(self, features: Features, places: Sequence[int]) -> Joined | Unjoined:
        """As ``Jagged.join``: on the device, if these are all features, in order, of tables without dynamic ids."""
        is_all = self.batch > 0 and list(places) == list(range(self._num_bags // self.batch))
        if features.has_dynamic_ids or not (is_all and 0 < len(self.given.ids) <= POSITIONS_MAX):
            return self.on_host.join(features, places)
        in_pool: Any = features.tables[0].in_pool
        made: Joined = in_pool(lambda pool: _JoinedThere(features, self, rows_of(pool)))
        return made


class _JoinedThere(Joined):
    """Ids of all features of a batch, joined and checked on the device. What the host has of them otherwise it fetches
    when it is first asked for: that waits for the device, and raises ValueError for a wrong id or offset."""

    rows: DeviceRows
    sent: DeviceBatch
    _places = _read_rows = None

    def __init__(self, features: Features, jagged: DeviceJagged, rows: DeviceRows) -> None:
        self.features, self.tables, self.batch = features, features.tables, jagged.batch
        self.rows = rows
        rows.begin()

        def explain(record: Int64s) -> ValueError:
            if record[-1]:
                return jagged.offsets_error(int(record[-1]) - 1)
            feature = int(np.flatnonzero(record)[0])
            error: ValueError = features.tables[features.table_of[feature]].id_error(int(record[feature]))
            return error

        self.sent = rows.join(features, self.batch, jagged.given, explain)

    def __len__(self) -> int:
        return len(self.sent)

    def __getattr__(self, name: str) -> Any:
        """What ``Joined.__init__`` sets."""
        if name not in ("bags", "_ids", "_keys", "_slots", "_numbering"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows, sent = self.rows, self.sent
        rows.require_right(sent)
        keys = rows.position_keys(sent)
        rows.streams.follow(sent.ready)
        starts = sent.bags.bag_starts.cpu().numpy().astype(np.int64)
        scale = NO_FLOATS if sent.bags.scale is None else sent.bags.scale.cpu().numpy()
        ends = starts[:: self.batch]
        super().__init__(
            self.features, self.batch, starts, scale, ids=(keys & ROW_MASK, ends[:-1], ends[1:]), keys=keys
        )
        return getattr(self, name)
