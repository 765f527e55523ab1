"""Many features in one call, as TorchRec's ``EmbeddingBagCollection`` and ``EmbeddingCollection``."""

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import TableConfig, require_names
from ..errors import TableError
from ..lookup.lookup import DeviceJagged, make_lookup
from ..pool.joined import Features, Jagged, Joined
from ..store import Store, Table
from ..store.arguments import check_jagged
from ..system.checks import excerpt
from .function import Prepared
from .jagged import JaggedLike, JaggedTensor, KeyedTensor
from .module import TieredModule


class _Feature(NamedTuple):
    name: str
    table: Table
    column: int


class Collection(TieredModule):
    """Features of some tables, looked up in one call; ``TieredEmbeddingBagCollection`` has arguments and errors."""

    def __init__(self, store: Store, *, tables: Sequence[str] | None = None) -> None:
        super().__init__(store)
        require_names(tables, "tables")
        names = list(store.tables if tables is None else tables)
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"tables names {excerpt(name)} {count} times; a table is looked up once for a feature")
        self.store = store
        self._features: dict[str, _Feature] = {}
        self._columns = 0
        self._place: dict[str, int] = {}  # of each feature of the last batch
        for table in [store[name] for name in names]:
            table.require_whole()
            for name in table.config.feature_names:
                if name in self._features:
                    owner = self._features[name].table.name
                    raise TableError(f"feature {name!r} belongs to the tables {owner!r} and {table.name!r}; rename one")
                self._features[name] = _Feature(name, table, self._columns)
                self._columns += table.layout.dim

    @property
    def tables(self) -> list[Table]:
        """The tables, in order."""
        return list(dict.fromkeys(feature.table for feature in self._features.values()))

    @property
    def feature_names(self) -> list[str]:
        """The features, in order of the tables."""
        return list(self._features)

    @property
    def _tables(self) -> list[Table]:
        return list({feature.table.layout: feature.table for feature in self._features.values()}.values())

    @property
    def device(self) -> torch.device:
        """Where results are."""
        return self.store.device

    def _sources(self, features: JaggedLike) -> tuple[Tensor, Tensor, Tensor | None]:
        if not (hasattr(features, "weights_or_none") and hasattr(features, "keys")):
            raise TypeError(
                f"a collection takes a KeyedJaggedTensor, not {type(features).__name__}; make one, as "
                "tierstore.KeyedJaggedTensor(names, ids, lengths=lengths)"
            )
        return features.values(), features.offsets(), features.weights_or_none()

    def _alike(self, table: Table) -> Any:
        return table.layout, table.config.pooling

    def _make_lookup(self, joined: Joined, mode: str) -> Any:
        return make_lookup(joined, mode=mode)

    def _checked(
        self, features: JaggedLike, sources: Any, scale: Tensor | None = None
    ) -> tuple[Jagged | DeviceJagged, dict[str, int]]:
        if getattr(features, "variable_stride_per_key", bool)():
            raise ValueError(
                "the batch's features may have different numbers of samples: give those with as many of each a "
                "KeyedJaggedTensor and a collection (tables=) of their own, and index_select what it gives"
            )
        keys, place = list(features.keys()), self._place
        if not place or [*place] != keys:
            place = {name: index for index, name in enumerate(keys)}
            if len(place) < len(keys):
                raise ValueError(f"the batch names a feature twice: {keys}")
            for name in self._features:
                if name not in place:
                    near = difflib.get_close_matches(name, keys, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else "; give it, or leave its table out of tables="
                    raise ValueError(f"feature {name!r} is missing from the batch, which has {keys}{hint}")
            self._place = place
        jagged = check_jagged(
            sources[0], sources[1], scale, "sum", device=self.store.device,
            offsets_type=self.store.offsets_type, ids_name="values", scale_name="weights",
        )  # fmt: skip
        batch, rest = divmod(jagged.batch, len(keys))
        if rest:
            raise ValueError(f"{jagged.batch} bags cannot be divided among {len(keys)} features")
        return jagged.of(batch), place

    def extra_repr(self) -> str:
        return ", ".join(f"{feature.name}: {feature.table!r}" for feature in self._features.values())


class TieredEmbeddingBagCollection(Collection):
    """Pools every feature of a set of tables; called as TorchRec's ``EmbeddingBagCollection`` is.

    The rows are no torch parameters: each table's optimizer runs at the end of backward, unless ``Store.optimizer``
    was asked for one, ``Store.commit`` makes the result durable, and ``state_dict()`` does not hold them. All
    lookups of a table in one backward pass are merged before its update, in the order of the forward calls, and in
    each in order of the table's ``feature_names``.

    Args:
        store: an open store.
        tables: names of its tables, in order; default: all.

    Raises:
        TypeError: ``store`` is none, or ``tables`` is one str. ValueError: it names a table twice. TableError: there is
            no such table, or two of them have a feature of one name.
    """

    def __init__(self, store: Store, *, tables: Sequence[str] | None = None, is_weighted: bool = True) -> None:
        super().__init__(store, tables=tables)
        self._is_weighted = is_weighted
        self._dims = [feature.table.layout.dim for feature in self._features.values()]
        self._groups = self._group_features()

    def forward(self, features: JaggedLike) -> KeyedTensor:
        """Pooled rows of every feature.

        Args:
            features: jagged ids, on the CPU or the store's device; it may have more features than the tables know
                (those are ignored) but not fewer. docs/gpu.md says which batches on a device are not waited for.

        Returns:
            KeyedTensor of float32 [B, sum of dims] on the store's device, features in order of the tables.

        Raises:
            ValueError, TypeError: a feature is missing, an id is no row, shapes do not fit. ClosedError, ChecksumError.
        """
        return KeyedTensor(self._features, self._dims, self._run((features,), self._sources(features)))

    def embedding_bag_configs(self) -> list[TableConfig]:
        """Of its tables, in order; they have the names of TorchRec's ``EmbeddingBagConfig``."""
        return [table.config for table in self.tables]

    def is_weighted(self) -> bool:
        """Whether a batch's weights are used."""
        return self._is_weighted

    def _prepare(self, sources: Any, features: JaggedLike) -> Prepared:
        scale = sources[2] if self._is_weighted else None
        jagged, place = self._checked(features, sources, scale)
        for table in self.tables if scale is not None else ():
            if table.config.pooling != "sum":
                given = f"table {table.name!r} has {table.config.pooling!r}"
                raise ValueError(f'weights go with pooling="sum" only; {given}: is_weighted=False ignores them')
        lookups = []
        for names, group in self._groups:
            joined = jagged.join(group, list(map(place.__getitem__, names)))
            lookups.append(self._make_lookup(joined, group.tables[0].config.pooling))
        return Prepared(lookups, (jagged.batch, self._columns), scale, sources, self.store)

    def _group_features(self) -> list[tuple[list[str], Features]]:
        """Features that one lookup can serve, with their names; those of one table are neighbours."""
        groups: dict[Any, list[_Feature]] = {}
        for each in self._features.values():
            groups.setdefault(self._alike(each.table), []).append(each)
        transposed = (tuple(map(list, zip(*group, strict=True))) for group in groups.values())
        return [(names, Features.of(tables, columns)) for names, tables, columns in transposed]


class TieredEmbeddingCollection(Collection):
    """Looks every id of a set of tables' features up; called as TorchRec's ``EmbeddingCollection`` is.

    Training is as with ``TieredEmbeddingBagCollection``, each id being a bag. A table's ``pooling`` plays no part.

    Args, errors: as of ``TieredEmbeddingBagCollection``.
    """

    def forward(self, features: JaggedLike) -> dict[str, JaggedTensor]:
        """Rows of every feature's ids, float32 [ids, dim] on the store's device, with the offsets of the samples; in
        order of the tables. ``features`` and errors: as of ``TieredEmbeddingBagCollection``; weights are ignored."""
        values, keys = self._run((features,), self._sources(features)), list(features.keys())
        offsets = features.offsets().cpu()
        batch = (len(offsets) - 1) // max(len(keys), 1)
        out, start, places = {}, 0, {name: place for place, name in enumerate(keys)}
        for feature in self._features.values():
            first = places[feature.name] * batch
            own = offsets[first : first + batch + 1]
            stop = start + int(own[-1] - own[0]) * feature.table.layout.dim
            rows = values[start:stop].view(-1, feature.table.layout.dim)
            out[feature.name] = JaggedTensor(rows, offsets=own - own[0])
            start = stop
        return out

    def _prepare(self, sources: Any, features: JaggedLike) -> Prepared:
        checked, place = self._checked(features, sources)
        lookups, elements, jagged = list[Any](), 0, checked.on_host
        for table in self.tables:  # a bag for each id of its features
            bounds = [place[name] * jagged.batch for name in table.config.feature_names]
            lists = [jagged.ids[jagged.offsets[first] : jagged.offsets[first + jagged.batch]] for first in bounds]
            flat: Any = np.concatenate(lists)
            offsets: Any = np.arange(len(flat) + 1, dtype=jagged.offsets.dtype)
            ids = Jagged(flat, offsets, len(flat))
            lookups.append(self._make_lookup(ids.join(Features.of([table], [0]), [0]), table.config.pooling))
            elements += len(flat) * table.layout.dim  # ``joined`` may be an exchange with other ranks
        return Prepared(lookups, (elements,), None, sources, self.store)

    def embedding_configs(self) -> list[TableConfig]:
        """Of its tables, in order; they have the names of TorchRec's ``EmbeddingConfig``."""
        return [table.config for table in self.tables]
