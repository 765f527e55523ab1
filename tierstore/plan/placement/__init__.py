"""Placement: which memory of which machine a workload's tables go to, and what a step then takes."""

from .describe import describe_comparison, describe_placement
from .plan import STRATEGIES, PlacementPlan, Room, Strategy, compare, place, planned_store
from .steps import TableDemand, expected_demand, measured_demand

__all__ = [
    "STRATEGIES",
    "PlacementPlan",
    "Room",
    "Strategy",
    "TableDemand",
    "compare",
    "describe_comparison",
    "describe_placement",
    "expected_demand",
    "measured_demand",
    "place",
    "planned_store",
]
