"""Dynamic batching: requests that wait together run together, within bounds of number, size and time."""

from .batcher import Batcher

__all__ = ["Batcher"]
