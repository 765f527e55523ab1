"""Models whose tables live in a store: DLRM with dot-product or DCN-v2 interaction, as it is or over towers. And how
sharp the minimum is that a model's training ended in."""

from .dlrm import DLRM, CrossNetwork, DCNTower, DLRMTower, DotInteraction, Towers
from .sharpness import box_sharpness, hessian_eigenvalues

__all__ = [
    "DLRM", "CrossNetwork", "DCNTower", "DLRMTower", "DotInteraction", "Towers", "box_sharpness", "hessian_eigenvalues",
]  # fmt: skip
