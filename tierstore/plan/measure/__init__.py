"""Measuring the machine at hand: its memory, its disk, its GPUs, and what tierstore's own work takes on it."""

from .measurement import Measurement, describe, measure
from .storage import READ_BYTES, DirectReader, DirectWriter, direct_reader

__all__ = [
    "READ_BYTES",
    "DirectReader",
    "DirectWriter",
    "Measurement",
    "describe",
    "direct_reader",
    "measure",
]
