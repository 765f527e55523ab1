"""Which models a store has."""

from collections.abc import Callable
from typing import NamedTuple

from ...nn import TieredEmbeddingBagCollection
from ...store import Store
from ...train.checkpoint import saved_config
from ..base import Model
from ..config import OutOfRange
from .lookups import FeatureRows, PooledFeatures, PooledTable, TableRows
from .ranking import Ranking

__all__ = ["Models", "make_models"]


class Models(NamedTuple):
    """Attributes:
    by_name: all of them.
    ranking: that of the run, or None if the store's commits are no run's.
    """

    by_name: dict[str, Model]
    ranking: Ranking | None


def make_models(store: Store, *, out_of_range: OutOfRange, count: Callable[[str, int], None]) -> Models:
    """The lookups of a store's tables, and the ranking model of the run that committed it.

    Args:
        out_of_range: what becomes of ids that are no rows.
        count: told the model and how many such ids were dropped.

    Raises:
        ConfigError: the run is of another release.
    """
    models: list[Model] = []
    for table in store.tables.values():
        models.append(PooledTable(table, out_of_range=out_of_range, count=count))
        models.append(TableRows(table, out_of_range=out_of_range, count=count))
    if store.tables:
        every = PooledFeatures(TieredEmbeddingBagCollection(store), out_of_range=out_of_range, count=count)
        models.append(every)
        if len({table.config.embedding_dim for table in store.tables.values()}) == 1:
            models.append(FeatureRows(every))
    ranking = _ranking(store, out_of_range, count)
    if ranking is not None:
        models.append(ranking)
    return Models({model.name: model for model in sorted(models, key=lambda model: model.name)}, ranking)


def _ranking(store: Store, out_of_range: OutOfRange, count: Callable[[str, int], None]) -> Ranking | None:
    config = saved_config(store.extra, str(store.directory))
    if config is None:
        return None
    collection = TieredEmbeddingBagCollection(store, tables=list(config.data.sparse_columns))
    pooled = PooledFeatures(collection, out_of_range=out_of_range, count=count)
    ranking = Ranking(pooled, config, out_of_range=out_of_range, count=count)
    ranking.load(store.tensors())
    return ranking
