"""Miss-ratio curves: simulated, exactly or from a sample of the rows."""

from .base import POLICIES, MissRatioCurve
from .build import Window, by_table, curve, windows
from .split import Split, shared_hit_rate, split_by_gain
from .text import describe_curves

__all__ = [
    "POLICIES",
    "MissRatioCurve",
    "Split",
    "Window",
    "by_table",
    "curve",
    "describe_curves",
    "shared_hit_rate",
    "split_by_gain",
    "windows",
]
