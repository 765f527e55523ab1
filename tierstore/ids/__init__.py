"""Dynamic ids: any int64 is an id, and gets a row of its own when it is admitted. And ids of texts."""

from .configs import LFU, LRU, TTL, Admission, DynamicIds, Eviction, Frequency, Probability
from .strings import of_strings

__all__ = [
    "LFU", "LRU", "TTL", "Admission", "DynamicIds", "Eviction", "Frequency", "Probability", "of_strings",
]  # fmt: skip
