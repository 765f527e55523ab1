"""A batch: its ids joined, looked up, and trained by a backward fused with the optimizer."""

from .lookup import Lookup

__all__ = ["Lookup"]
