"""Compiling kernels before they are needed."""

from .compiling import WarmedUp, warm_up

__all__ = ["WarmedUp", "warm_up"]
