"""Measuring the machine at hand: its memory, its disk, and what tierstore's own work takes on it."""

from ...system import page_cache
from .measurement import READ_BYTES, DirectReader, describe, direct_reader, measure

__all__ = ["READ_BYTES", "DirectReader", "describe", "direct_reader", "measure", "page_cache"]
