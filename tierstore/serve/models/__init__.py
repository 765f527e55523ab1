"""What is served: each table and all of them together as lookups, and the ranking model of a training run."""

from .lookups import FeatureRows, PooledFeatures, PooledTable, TableRows
from .make import Models, make_models
from .ranking import Ranking

__all__ = ["FeatureRows", "Models", "PooledFeatures", "PooledTable", "Ranking", "TableRows", "make_models"]
