"""Models whose tables live in a store: DLRM with dot-product or DCN-v2 interaction, as it is or over towers."""

from .dlrm import DLRM, CrossNetwork, DotInteraction
from .towers import DCNTower, DLRMTower, Towers

__all__ = ["DLRM", "CrossNetwork", "DCNTower", "DLRMTower", "DotInteraction", "Towers"]
