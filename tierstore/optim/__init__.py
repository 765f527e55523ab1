"""Optimizers. Of rows: sparse ones that run inside backward, with their state stored in each row. Of dense weights:
``HessianFree``, which is torch's kind."""

from .configs import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, from_dict
from .curvature import HessianFree

__all__ = ["SGD", "Adagrad", "Adam", "HessianFree", "Optimizer", "RowWiseAdagrad", "from_dict"]
