"""Compiled kernels over rows in slots, and what they are made of."""

from .slots import *  # noqa: F403
from .slots import __all__ as __all__
