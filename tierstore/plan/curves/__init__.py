"""Miss-ratio curves: simulated, exactly or from a sample of the rows."""

from .base import POLICIES, MissRatioCurve
from .build import Window, by_table, curve, windows
from .text import describe_curves

__all__ = [
    "POLICIES",
    "MissRatioCurve",
    "Window",
    "by_table",
    "curve",
    "describe_curves",
    "windows",
]
