"""The ids of some features of one pool laid end to end, as row keys or as slots."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import kernels
from ..kernels.arrays import Floats, Ids, Int32s, Int64s, Words
from ..kernels.rounding import NEAREST
from ..layout import KEY_ROW_BITS
from ..optim.configs import Hyper
from ..pool.backward import Groups
from ..pool.bags import NO_FLOATS, Bags, Numbering
from ..pool.residency import Batch, Distinct, IdsOfBags
from .tables import LookupTable


class Jagged(NamedTuple):
    """Ids of many features, key-major: all bags of feature 0, then all of feature 1, ...

    Attributes:
        ids: int64 or int32 [N].
        offsets: int64 or int32 [features * batch + 1].
        batch: bags of each feature.
        scale: float32 [N], per-sample weights, or None.
    """

    ids: Ids
    offsets: Ids
    batch: int
    scale: Floats | None = None

    def of(self, batch: int) -> "Jagged":
        """The same bags, so many of each feature."""
        return self._replace(batch=batch)

    @property
    def on_host(self) -> "Jagged":
        """Itself; see ``on_device.DeviceJagged``."""
        return self

    def join(self, features: "Features", places: Sequence[int]) -> "Joined":
        """The ids of some features; ``places``: which of these each of them is."""
        return Joined(features, self, places)


class Features:
    """Features that one lookup serves, the same in each batch; those of one table are neighbours.

    Args:
        tables: the table of each; all in one pool.
        columns: where each one's results begin in the output's columns.

    Attributes:
        owners: the table of each.
        tables: distinct, in order of first use.
        columns: int32 [features].
        bounds: int64 [tables + 1], the features of each table.
        table_of: int32 [features], which of ``tables`` each one's is.
        indices: int64 [features], of its table in the store; num_rows: int64 [features].
    """

    def __init__(self, tables: Sequence[LookupTable], columns: ArrayLike) -> None:
        self.owners = tables
        self.tables = list(dict.fromkeys(tables))
        self.columns = np.asarray(columns, np.int32)
        bounds = [i for i, table in enumerate(tables) if not i or table is not tables[i - 1]]
        self.bounds = np.array([*bounds, len(tables)], np.int64)
        self.table_of = tables_of(self.bounds)
        self.indices = np.array([table.index for table in tables], np.int64)
        self.num_rows = np.array([table.config.num_embeddings for table in tables], np.int64)


def tables_of(bounds: Int64s) -> Int32s:
    """int32 [features], the table of each, where the features of table t are ``[bounds[t], bounds[t + 1])``."""
    return np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), bounds[1:] - bounds[:-1])


class Joined:
    """The ids of some features laid end to end, as row keys or as slots.

    Args:
        features: those chosen.
        jagged: the batch; its offsets are kept, so nobody may change them.
        places: which feature of ``jagged`` each of them is.

    Attributes:
        tables: distinct, in order of first use.
        table_bags: int64 [tables + 1], the bags of each; table_of: int32 [features], the table of each feature.
        bag_starts: int64 or int32 [features * batch + 1], where each bag begins in what is laid end to end.
        scale: float32 [N], per-sample weights, or empty.
        columns: int32 [features].
        batch: bags of each feature.
        bags: where its positions lie.
    """

    bag_starts: Any
    bags: Bags

    def __init__(self, features: Features, jagged: Jagged, places: Sequence[int]) -> None:
        self.tables, self.columns, self.table_of = features.tables, features.columns, features.table_of
        self.batch = batch = jagged.batch
        self.table_bags = features.bounds * batch
        self._features = features
        self._ids = jagged.ids
        self._keys: Int64s | None = None
        self._slots: Any = None
        self._numbering: Numbering | None = None
        if places == list(range((len(jagged.offsets) - 1) // max(batch, 1))):
            self.bag_starts = jagged.offsets
            ends = jagged.offsets[np.arange(len(places) + 1) * batch].astype(np.int64)
            self._starts, self._stops = ends[:-1], ends[1:]
        else:
            self._choose(jagged.offsets, np.asarray(places))
        self.scale = NO_FLOATS if jagged.scale is None else self._gather(jagged.scale)
        self.bags = Bags(self.tables, self.table_bags, self.bag_starts, self.columns, batch, self.scale)

    def _choose(self, offsets: Ids, features: Int64s) -> None:
        """Lay the chosen features end to end."""
        lists = offsets[np.add.outer(features * self.batch, np.arange(self.batch + 1))]
        self._starts, self._stops = lists[:, 0].astype(np.int64), lists[:, -1].astype(np.int64)
        sizes = self._stops - self._starts
        shifts = np.cumsum(sizes) - sizes - self._starts
        starts = np.append((lists[:, :-1] + shifts[:, None]).ravel(), sizes.sum())
        self.bag_starts = starts.astype(offsets.dtype, copy=False)

    def __len__(self) -> int:
        return int(self.bag_starts[-1])

    @property
    def num_bags(self) -> int:
        return len(self.columns) * self.batch

    # The caller's ids are read once: later changes of their memory reach neither keys nor slots.

    @property
    def is_read(self) -> bool:
        """Whether the caller's ids were read: they may have changed since."""
        return self._keys is not None or self._numbering is not None

    @property
    def keys(self) -> Int64s:
        """int64 [N], row keys.

        Raises:
            ValueError: an id outside its table; names the table and the id.
        """
        if self._keys is None:
            known = self._numbering
            if known is None:
                keys = np.empty(int(self.bag_starts[-1]), np.int64)
                self._read(None, keys)
            else:
                keys = self._slots + self.bags.shifts(known)
            self._keys = keys
        return self._keys

    @cached_property
    def distinct(self) -> Distinct:
        """The rows of ``keys``; errors as there."""
        return Distinct.of(self.keys)

    @cached_property
    def keyed(self) -> Batch:
        """The batch as a pool takes it whose rows may be evicted; errors as ``keys``.

        In order of use, which is sample by sample: rows used by one sample lie together when they have left memory. It
        plays no part where no row will be written.
        """
        keys, order = self.keys, None
        if 1 < self.batch < len(self.bag_starts) - 1 and not self.tables[0].store.readonly:
            order = np.empty(len(keys), np.int64)
            kernels.order_by_sample(self.bag_starts, self.batch, order)
        return Batch(self.bags, keys, order)

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
        """Take over what ``slots`` would find."""
        self._slots, self._numbering = slots, numbering

    def _read(self, numbering: Numbering | None, out: NDArray[Any]) -> None:
        """As ``write``, from the caller's ids."""
        join: Any = kernels.join_ids
        bad = join(0, len(self.bag_starts) - 1, *self.ids_of_bags(numbering), out)
        if bad >= 0:
            self.check([bad])

    def ids_of_bags(self, numbering: Numbering | None) -> IdsOfBags:
        """What ``kernels.look_up`` and, without a numbering, ``kernels.join_ids`` take behind the range of bags."""
        indices = self._features.indices
        firsts = indices << KEY_ROW_BITS if numbering is None else numbering.first_slots(indices)
        return IdsOfBags(self._ids, self._starts, firsts, self._features.num_rows, self.batch, self.bag_starts)

    def check(self, positions: list[int]) -> None:
        """Raise ValueError if one of them is the position of an id outside its table."""
        bad = [position for position in positions if position >= 0]
        for table, (start, stop) in zip(self._features.owners, self._sources, strict=True) if bad else ():
            own = [position for position in bad if start <= position < stop]
            if own:
                raise table.id_error(int(self._ids[min(own)]))

    def _gather(self, scale: Floats) -> Floats:
        return np.concatenate([scale[start:stop] for start, stop in self._sources] or [NO_FLOATS])

    @property
    def _sources(self) -> list[tuple[int, int]]:
        """Where each feature's ids lie in the batch."""
        return list(zip(self._starts.tolist(), self._stops.tolist(), strict=True))

    def scatter(self, values: Floats, out: Floats) -> None:
        """Add a value of each position to ``out``, float32 [ids of the batch], where its id came from."""
        place = 0
        for start, stop in self._sources:
            out[start:stop] += values[place : place + stop - start]
            place += stop - start

    def require_trainable(self) -> None:
        """ReadOnlyError for tables of quantized rows; all are of one layout."""
        self.tables[0].require_float()

    def groups(self, arg_max: Int32s, num_columns: int, *, is_mean: bool) -> Groups:
        """Its positions, to be grouped by row.

        Args:
            arg_max: int32 [bags, dim], the positions that gave maxima, or empty.
            num_columns: of the output.
            is_mean: bags were averaged.
        """
        return Groups(self.bags, arg_max, num_columns, self.tables[0].store.workers, is_mean=is_mean)

    @property
    def table_of_feature(self) -> Sequence[LookupTable]:
        """The table of each feature."""
        return self._features.owners

    def next_hyper(self) -> list[Hyper]:
        """Count one more update of each table: its hyper-parameters."""
        return [table.next_hyper() for table in self.tables]

    def rounding_seeds(self) -> Words | None:
        """What the update counted last rounds with (``rounding``), uint64 [tables]; None if to nearest everywhere."""
        seeds = [table.rounding_seed for table in self.tables]
        return None if seeds.count(NEAREST) == len(seeds) else np.array(seeds, np.uint64)


class OverJoined:
    """What lookups of joined ids have in common.

    Attributes:
        joined: the ids.
        mode: how they are pooled.
    """

    joined: Joined
    mode: str

    @property
    def group(self) -> Hashable:
        table = self.joined.tables[0]
        return table.store, table.layout, self.mode

    @property
    def tables(self) -> Sequence[LookupTable]:
        """Those of its rows, in order."""
        return self.joined.tables


class OfKeys(Joined):
    """Rows by key, in any order: a bag for each, its result where the caller has the key, in a flat output.

    Args:
        tables: distinct, of one pool; each key is of one of them.
        keys: int64 [n].
    """

    def __init__(self, tables: Sequence[LookupTable], keys: Int64s) -> None:
        indices = [table.index for table in tables]
        places = np.zeros(max(indices) + 1, np.int64)
        places[indices] = np.arange(len(indices))
        table_of = places[keys >> KEY_ROW_BITS]
        order = np.argsort(table_of, kind="stable")
        self.tables = list(tables)
        self.batch = 1
        self.table_of = table_of[order].astype(np.int32)
        self.table_bags = np.searchsorted(self.table_of, np.arange(len(tables) + 1))
        self.bag_starts = np.arange(len(keys) + 1)
        columns: Any = order * tables[0].layout.dim
        self.columns = columns
        self.scale = NO_FLOATS
        self.bags = Bags(self.tables, self.table_bags, self.bag_starts, self.columns, 1, NO_FLOATS)
        self._keys = keys[order]
        self._slots = self._numbering = None
