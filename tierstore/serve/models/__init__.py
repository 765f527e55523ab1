"""What is served: each table and all of them together as lookups, and the ranking model of a training run."""

from .bags import BagCaches
from .lookups import FeatureRows, PooledFeatures, PooledTable, TableRows
from .make import Models, Renewal, make_models, rehearse, renew_models
from .ranking import Ranking

__all__ = [
    "BagCaches",
    "FeatureRows",
    "Models",
    "PooledFeatures",
    "PooledTable",
    "Ranking",
    "Renewal",
    "TableRows",
    "make_models",
    "rehearse",
    "renew_models",
]
