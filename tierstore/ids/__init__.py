"""Dynamic ids: any int64 is an id, and gets a row of its own when it is admitted."""

from .configs import LFU, LRU, TTL, Admission, DynamicIds, Eviction, Frequency, Probability

__all__ = ["LFU", "LRU", "TTL", "Admission", "DynamicIds", "Eviction", "Frequency", "Probability"]
