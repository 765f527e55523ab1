"""Measuring the machine at hand: its memory, its disk, its GPUs, and what tierstore's own work takes on it."""

from .measurement import describe, measure
from .storage import READ_BYTES, DirectReader, direct_reader

__all__ = ["READ_BYTES", "DirectReader", "describe", "direct_reader", "measure"]
