"""Placement: which memory of which machine a workload's tables go to, and how they are shared among equal devices."""

from .costs import CostModel, LinearCost
from .describe import describe_comparison, describe_placement, describe_shards
from .learned import Accuracy, LearnedCost, accuracy, fit_cost, read_cost, write_cost
from .measurement import Measurement, read_measurements, write_measurements
from .plan import STRATEGIES, PlacedPart, PlacementPlan, Room, Step, StoreModel, Strategy, TierUse
from .shapes import LookupShape
from .sharding import Part, ShardPlan, SplitTable, shard
from .strategies import compare, place
from .through_tiers import planned_store
from .timing import QUICK, Timing, measure_costs, measure_lookups
from .traffic import TableDemand, expected_demand, measured_demand

__all__ = [
    "QUICK",
    "STRATEGIES",
    "Accuracy",
    "CostModel",
    "LearnedCost",
    "LinearCost",
    "LookupShape",
    "Measurement",
    "Part",
    "PlacedPart",
    "PlacementPlan",
    "Room",
    "ShardPlan",
    "SplitTable",
    "Step",
    "StoreModel",
    "Strategy",
    "TableDemand",
    "TierUse",
    "Timing",
    "accuracy",
    "compare",
    "describe_comparison",
    "describe_placement",
    "describe_shards",
    "expected_demand",
    "fit_cost",
    "measure_costs",
    "measure_lookups",
    "measured_demand",
    "place",
    "planned_store",
    "read_cost",
    "read_measurements",
    "shard",
    "write_cost",
    "write_measurements",
]
