"""Many features in one call, as TorchRec's ``EmbeddingBagCollection``."""

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..errors import TableError
from ..lookup import Lookup
from ..lookup.hbm import HbmLookup
from ..lookup.joined import Jagged
from ..store import Store, Table
from ..store.arguments import check_ids, check_offsets, check_scale
from ..store.table import make_lookup
from ..system.excerpt import excerpt
from .function import Prepared
from .jagged import JaggedLike, KeyedTensor
from .module import TieredModule


class _Feature(NamedTuple):
    name: str
    table: Table
    column: int


class TieredEmbeddingBagCollection(TieredModule):
    """Pools every feature of a set of tables; called as TorchRec's ``EmbeddingBagCollection`` is.

    The rows are no torch parameters: each table's optimizer runs at the end of backward, ``Store.commit`` makes the
    result durable, and ``state_dict()`` does not hold them. All lookups of a table in one backward pass are merged
    before its update, in the order of the forward calls, and in each in order of the table's ``feature_names``.

    Args:
        store: an open store.
        tables: names of its tables, in order; default: all.

    Raises:
        TypeError: ``tables`` is one str. ValueError: it names a table twice. TableError: there is no such table, or two
            of them have a feature of one name.
    """

    def __init__(self, store: Store, *, tables: Sequence[str] | None = None) -> None:
        super().__init__(store)
        if isinstance(tables, str):
            raise TypeError(f"tables must be a list of names, not the str {excerpt(tables)}")
        names = list(store.tables if tables is None else tables)
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"tables names {excerpt(name)} {count} times; a table is looked up once for a feature")
        self.store = store
        self._features: dict[str, _Feature] = {}
        column = 0
        for table in [store[name] for name in names]:
            for name in table.config.feature_names:
                if name in self._features:
                    owner = self._features[name].table.name
                    raise TableError(f"feature {name!r} belongs to the tables {owner!r} and {table.name!r}; rename one")
                self._features[name] = _Feature(name, table, column)
                column += table.layout.dim
        self._columns = column
        self._groups = self._group_features()
        self._dims = [feature.table.layout.dim for feature in self._features.values()]

    @property
    def tables(self) -> list[Table]:
        """The tables, in order."""
        return list(dict.fromkeys(feature.table for feature in self._features.values()))

    @property
    def feature_names(self) -> list[str]:
        """The features, in the order of the output's columns."""
        return list(self._features)

    def forward(self, features: JaggedLike) -> KeyedTensor:
        """Pooled rows of every feature.

        Args:
            features: jagged ids, on the CPU or the store's device (there they are waited for); it may have more
                features than the tables know (those are ignored) but not fewer.

        Returns:
            KeyedTensor of float32 [B, sum of dims] on the store's device, features in order of the tables.

        Raises:
            ValueError, TypeError: a feature is missing, an id is no row, shapes do not fit. ClosedError, ChecksumError.
        """
        values = self._run((features,), _sources(features), (-1, self._columns))
        return KeyedTensor(self.feature_names, self._dims, values)

    @property
    def _tables(self) -> list[Table]:
        return [group[0].table for group in self._groups]

    def _prepare(self, features: JaggedLike) -> Prepared:
        sources = _sources(features)
        keys = list(features.keys())
        place = {name: index for index, name in enumerate(keys)}
        if len(place) < len(keys):
            raise ValueError(f"the batch names a feature twice: {keys}")
        for name in self._features:
            if name not in place:
                near = difflib.get_close_matches(name, keys, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"feature {name!r} is missing from the batch, which has {keys}{hint}")
        device = self.store.device
        ids = check_ids(features.values(), "values", device=device)
        offsets = check_offsets(features.offsets(), len(ids), device=device)
        scale = features.weights_or_none()
        batch, rest = divmod(len(offsets) - 1, len(keys))
        if rest:
            raise ValueError(f"{len(offsets) - 1} bags cannot be divided among {len(keys)} features")
        scale_array = None if scale is None else check_scale(scale, len(ids), "sum", "weights", device=device)
        jagged = Jagged(ids, offsets, batch, scale_array)
        lookups = [self._lookup(group, jagged, place) for group in self._groups]
        return Prepared(lookups, batch, scale, sources, self.store)

    def _group_features(self) -> list[list[_Feature]]:
        """Features that one lookup can serve: same layout, same pooling; those of one table are neighbours."""
        groups: dict[Any, list[_Feature]] = {}
        for feature in self._features.values():
            groups.setdefault((feature.table.layout, feature.table.config.pooling), []).append(feature)
        return list(groups.values())

    def _lookup(self, group: list[_Feature], jagged: Jagged, place: dict[str, int]) -> Lookup | HbmLookup:
        config = group[0].table.config
        if jagged.scale is not None and config.pooling != "sum":
            raise ValueError(f'weights go with pooling="sum" only; table {config.name!r} has {config.pooling!r}')
        return make_lookup(
            [feature.table for feature in group],
            jagged,
            np.array([place[feature.name] for feature in group], np.int64),
            [feature.column for feature in group],
            mode=config.pooling,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{feature.name}: {feature.table!r}" for feature in self._features.values())


def _sources(features: JaggedLike) -> tuple[Tensor | None, ...]:
    if not hasattr(features, "weights_or_none"):
        raise TypeError(f"a collection takes a KeyedJaggedTensor, not {type(features).__name__}")
    return features.values(), features.offsets(), features.weights_or_none()
