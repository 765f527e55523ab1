"""Dynamic batching: requests that wait together run together, within bounds of number, size and time."""

from .batcher import Batcher
from .executor import OneThread

__all__ = ["Batcher", "OneThread"]
