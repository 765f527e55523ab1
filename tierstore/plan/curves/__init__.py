"""Miss-ratio curves: simulated, exactly or from a sample of the rows."""

from .base import POLICIES, MissRatioCurve

__all__ = ["POLICIES", "MissRatioCurve"]
