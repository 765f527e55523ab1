"""Placement: which rank of many gets which rows and columns of a workload's tables, and what a step then takes."""

from .costs import Predicted, RankCosts, predict
from .demand import Demands, TableDemand, expected_demand, measured_demand
from .describe import describe_costs, describe_placement
from .search import Found, Search

__all__ = [
    "Demands",
    "Found",
    "Predicted",
    "RankCosts",
    "Search",
    "TableDemand",
    "describe_costs",
    "describe_placement",
    "expected_demand",
    "measured_demand",
    "predict",
]
