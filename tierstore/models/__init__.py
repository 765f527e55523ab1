"""Models whose tables live in a store: DLRM with dot-product or DCN-v2 interaction."""

from .dlrm import DLRM
from .interaction import CrossNetwork, DotInteraction

__all__ = ["DLRM", "CrossNetwork", "DotInteraction"]
