"""Compiling kernels before they are needed."""

from .ahead import WarmedUp, warm_up

__all__ = ["WarmedUp", "warm_up"]
