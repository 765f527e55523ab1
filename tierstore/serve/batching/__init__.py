"""Dynamic batching: requests that wait together run together, within bounds of number and size."""

from .batcher import Batcher, OneThread, between

__all__ = ["Batcher", "OneThread", "between"]
