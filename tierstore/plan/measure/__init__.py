"""Measuring the machine at hand: its memory, its disk, its GPUs, and what tierstore's own work takes on it."""

from .describe import describe
from .direct import READ_BYTES, DirectReader, DirectWriter, direct_reader
from .measurement import Measurement, measure, measure_host

__all__ = [
    "READ_BYTES",
    "DirectReader",
    "DirectWriter",
    "Measurement",
    "describe",
    "direct_reader",
    "measure",
    "measure_host",
]
