"""Models whose tables live in a store: DLRM with dot-product or DCN-v2 interaction."""

from .dlrm import DLRM, CrossNetwork, DotInteraction

__all__ = ["DLRM", "CrossNetwork", "DotInteraction"]
