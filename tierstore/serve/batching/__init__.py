"""Dynamic batching: requests that wait together run together, within bounds of number and size."""

from .batcher import Batcher
from .executor import OneThread

__all__ = ["Batcher", "OneThread"]
