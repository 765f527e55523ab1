"""Miss-ratio curves: simulated, exactly or from a sample of the rows."""

from .base import POLICIES, MissRatioCurve, describe_curves
from .build import CurveOptions, by_table, curve

__all__ = ["POLICIES", "CurveOptions", "MissRatioCurve", "by_table", "curve", "describe_curves"]
