"""Miss-ratio curves: simulated, exactly or from a sample of the rows."""

from .base import POLICIES, MissRatioCurve, describe_curves
from .build import CurveOptions, Window, by_table, curve, windows

__all__ = [
    "POLICIES",
    "CurveOptions",
    "MissRatioCurve",
    "Window",
    "by_table",
    "curve",
    "describe_curves",
    "windows",
]
