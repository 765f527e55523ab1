"""Placement: which rank gets which rows and columns of each table, and what a training step then takes."""

from .costs import Demand, RankCosts, TableDemand, demand_of
from .search import Prediction, Search, predict

__all__ = ["Demand", "Prediction", "RankCosts", "Search", "TableDemand", "demand_of", "predict"]
