"""Dynamic batching: requests that wait together run together, within bounds of number, size and time."""

from .batcher import Batcher, BatchingConfig, BatchObserver, BatchResult, Ran, Run

__all__ = ["BatchObserver", "BatchResult", "Batcher", "BatchingConfig", "Ran", "Run"]
