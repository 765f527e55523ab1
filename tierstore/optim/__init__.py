"""Optimizers. Of rows: sparse ones that run inside backward, with their state stored in each row. Of dense weights:
``HessianFree``, which is torch's kind."""

from typing import TYPE_CHECKING

from .. import system as _system
from .configs import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, from_dict

if TYPE_CHECKING:
    from .curvature import HessianFree
else:
    __getattr__, __dir__ = _system.late(globals(), {"HessianFree": "curvature"})

__all__ = ["SGD", "Adagrad", "Adam", "HessianFree", "Optimizer", "RowWiseAdagrad", "from_dict"]
