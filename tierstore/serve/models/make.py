"""Which models a store has, and which it has after it moved to another version."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ...errors import TierstoreError
from ...nn import TieredEmbeddingBagCollection
from ...store import Store
from ...store.newer import Newer
from ...train.checkpoint import saved_config
from ..base import Model
from ..config import OutOfRange
from ..messages import DATATYPES, InferTensor, TensorSpec
from .bags import BagCaches
from .lookups import FeatureRows, PooledFeatures, PooledTable, TableRows
from .ranking import Ranking

__all__ = ["Models", "Renewal", "make_models", "rehearse", "renew_models"]

_LOG: Final = logging.getLogger("tierstore.serve")
Count = Callable[[str, int], None]


class Models(NamedTuple):
    """Attributes:
    by_name: all of them.
    ranking: that of the run, or None if the store's commits are no run's.
    tables: names of the store's.
    """

    by_name: dict[str, Model]
    ranking: Ranking | None
    tables: tuple[str, ...] = ()


def make_models(store: Store, bags: BagCaches | None, *, out_of_range: OutOfRange, count: Count) -> Models:
    """The lookups of a store's tables, and the ranking model of the run that committed it.

    Args:
        bags: keeps the pooled rows of single tables, or None.
        out_of_range: what becomes of ids that are no rows.
        count: told the model and how many such ids were dropped.

    Raises:
        ConfigError: the run is of another release. DamagedError: it has no weights for its model.
    """
    return _joined(store, _lookups(store, bags, out_of_range, count), _ranking(store, out_of_range, count))


def _joined(store: Store, lookups: list[Model], ranking: Ranking | None) -> Models:
    models = lookups if ranking is None else [*lookups, ranking]
    by_name = {model.name: model for model in sorted(models, key=lambda model: model.name)}
    return Models(by_name, ranking, tuple(store.tables))


def _lookups(store: Store, bags: BagCaches | None, out_of_range: OutOfRange, count: Count) -> list[Model]:
    models: list[Model] = []
    for table in store.tables.values():
        models.append(PooledTable(table, out_of_range=out_of_range, count=count, bags=bags))
        models.append(TableRows(table, out_of_range=out_of_range, count=count))
    features = [name for table in store.tables.values() for name in table.config.feature_names]
    if features and len(set(features)) == len(features):  # else none of its own stands for one of them
        every = PooledFeatures(TieredEmbeddingBagCollection(store), out_of_range=out_of_range, count=count)
        models.append(every)
        if len({table.config.embedding_dim for table in store.tables.values()}) == 1:
            models.append(FeatureRows(every))
    return models


def _ranking(store: Store, out_of_range: OutOfRange, count: Count) -> Ranking | None:
    config = saved_config(store.extra, str(store.directory))
    if config is None:
        return None
    collection = TieredEmbeddingBagCollection(store, tables=list(config.data.sparse_columns))
    pooled = PooledFeatures(collection, out_of_range=out_of_range, count=count)
    ranking = Ranking(pooled, config, out_of_range=out_of_range, count=count)
    tensors = store.tensors()
    ranking.require(tensors)
    ranking.load(tensors)
    return ranking


class Renewal(NamedTuple):
    """What is known of the models after a move, before it.

    Attributes:
        before: the models until then.
        weights: for the ranking model there was; None if the new version is not of its run.
        has_run: whether the new version is of a run.
    """

    before: Models
    weights: Mapping[str, Tensor] | None
    has_run: bool

    def models(self, store: Store, bags: BagCaches | None, *, out_of_range: OutOfRange, count: Count) -> Models:
        """The models once the store has moved: those there were, as far as they are the same. In between two batches.

        A run whose model cannot be made of its commit is left out, with a word in the log: its tables are served.
        """
        before = self.before
        if self.weights is not None and before.ranking is not None:
            before.ranking.load(self.weights)
        ranking = None if self.weights is None else before.ranking
        if tuple(store.tables) == before.tables and ranking is before.ranking and self.has_run == (ranking is not None):
            return before
        if self.has_run and ranking is None:
            try:
                ranking = _ranking(store, out_of_range, count)
            except Exception:
                _LOG.exception("version %d is served without its ranking model", store.version)
        made = _joined(store, _lookups(store, bags, out_of_range, count), ranking)
        same = {name: self._same(name, model) for name, model in made.by_name.items()}
        return made._replace(by_name=same)

    def _same(self, name: str, made: Model) -> Model:
        old = self.before.by_name.get(name)
        is_same = old is not None and not isinstance(made, Ranking) and old.metadata("") == made.metadata("")
        return old if is_same and old is not None else made


def renew_models(before: Models, newer: Newer) -> Renewal:
    """Check, before a store moves, what its models will need.

    Raises:
        ConfigError: the commit's run is of another release. DamagedError: its weights are not all there.
    """
    ranking, extra = before.ranking, newer.version.extra
    if ranking is not None and ranking.is_of(extra):
        weights = newer.tensors()
        ranking.require(weights)
        return Renewal(before, weights, has_run=True)
    return Renewal(before, None, has_run=saved_config(extra, "the newest commit") is not None)


def rehearse(models: Iterable[Model]) -> None:
    """Ask each model for its tables' first rows: one request alone, and two together, so that no request waits
    until kernels are compiled or loaded. What fails is told in the log."""
    for model in models:
        specs = {spec.name: spec for spec in model.metadata("").inputs}
        num_ids = specs["lengths"].shape[0] if "lengths" in specs else 1
        inputs = {name: _input(spec, max(1, num_ids)) for name, spec in specs.items()}
        try:
            query = model.parse(inputs)
            model.run([query])
            model.run([query, query])
        except TierstoreError as error:
            _LOG.warning("model %s fails on its first row: %s", model.name, error)


def _input(spec: TensorSpec, num_ids: int) -> InferTensor:
    """One sample: each feature has id 0."""
    dtype: Any = DATATYPES[spec.datatype]
    if spec.name == "lengths":
        return InferTensor(spec.datatype, np.ones([max(1, size) for size in spec.shape], dtype))
    shape = (num_ids,) if len(spec.shape) == 1 else tuple(max(1, size) for size in spec.shape)
    return InferTensor(spec.datatype, np.zeros(shape, dtype))
