"""Placement: which memory of which machine a workload's tables go to, and what a step then takes."""

from .describe import describe_comparison, describe_placement
from .on_ssd import planned_store
from .plan import STRATEGIES, PlacedPart, PlacementPlan, Room, Step, StoreModel, Strategy, TierUse
from .steps import TableDemand, expected_demand, measured_demand
from .strategies import compare, place

__all__ = [
    "STRATEGIES",
    "PlacedPart",
    "PlacementPlan",
    "Room",
    "Step",
    "StoreModel",
    "Strategy",
    "TableDemand",
    "TierUse",
    "compare",
    "describe_comparison",
    "describe_placement",
    "expected_demand",
    "measured_demand",
    "place",
    "planned_store",
]
