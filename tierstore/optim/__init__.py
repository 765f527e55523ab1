"""Sparse optimizers that run inside backward, with their state stored in each row."""

from .configs import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, from_dict

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer", "RowWiseAdagrad", "from_dict"]
