"""The row caches: which rows are resident, in which slot, and which row is the next victim.

=========  =====================================================================
policy     cache
=========  =====================================================================
"auto"     what we think best: "tinylfu"; may change between releases
"lru"      host memory, exact least-recently-used; array kernels
"lfu"      host memory, exact least-frequently-used; array kernels
"tinylfu"  host memory, least frequently used by counts that outlive
           residence and age, or LRU where a sample says that it hits more
=========  =====================================================================

These are in host memory. Where there is room for every row, ``FullCache`` takes their place: it evicts nothing, so it
needs no policy.  ``tierstore.hbm.cache`` has that of device memory.
"""

import bisect
from typing import Any, Final

from ..system.checks import require_choice as _require_choice
from ..system.checks import require_int as _require_int
from .base import Admission, AdmitStatus, CacheCounters, Listing, Pinned, RowCache
from .ddr import OVERHEAD_BYTES, DdrCache
from .ddr import overhead_bytes_of as _overhead_bytes_of
from .full import TABLE_BYTES, FullCache, full_size_bytes
from .host_cache import CAPACITY_MAX as _CAPACITY_MAX
from .host_cache import NUMBER_MAX as _NUMBER_MAX
from .host_cache import arena_bytes as _arena_bytes

__all__ = [
    "AUTO",
    "OVERHEAD_BYTES",
    "POLICIES",
    "TABLE_BYTES",
    "Admission",
    "AdmitStatus",
    "CacheCounters",
    "DdrCache",
    "FullCache",
    "Listing",
    "Pinned",
    "RowCache",
    "capacity_for",
    "full_size_bytes",
    "make_cache",
    "resolve_policy",
    "size_bytes_of",
]

AUTO: Final = "auto"
"""The default policy's name."""
_BEST: Final = "tinylfu"
"""Of the host's policies; docs/performance.md has the measurements."""
POLICIES: Final[tuple[str, ...]] = (AUTO, *OVERHEAD_BYTES)
"""Names that ``make_cache`` accepts."""


def resolve_policy(policy: str) -> str:
    """The policy that a name stands for: "auto" stands for another, any other for itself."""
    return _BEST if policy == AUTO else policy


def _checked(policy: str) -> Any:
    policy = resolve_policy(policy)
    _require_choice(policy, POLICIES, "policy")
    return policy


def make_cache(policy: str, capacity: int, *, weight_words: int, state_words: int) -> RowCache:
    """A new, empty cache in host memory.

    Args:
        policy: one of ``POLICIES``.
        capacity: rows, at least 1.
        weight_words: 64-bit words of weights a row.
        state_words: 64-bit words of optimizer state a row.

    Raises:
        ValueError: unknown policy, or a size out of range.
    """
    return DdrCache(capacity, weight_words=weight_words, state_words=state_words, policy=_checked(policy))


def capacity_for(policy: str, budget_bytes: int, *, weight_words: int, state_words: int) -> int:
    """The largest capacity whose rows, index and policy fit the budget; 0 if not even one row does.

    Raises:
        ValueError, TypeError: unknown policy, or a number of words that is negative or none.
    """
    for name, words in (("weight_words", weight_words), ("state_words", state_words)):
        _require_int(words, name, 0, _NUMBER_MAX)
    most = min(max(budget_bytes, 0) // OVERHEAD_BYTES[_checked(policy)], _CAPACITY_MAX)

    def size_bytes(capacity: int) -> int:
        return size_bytes_of(policy, capacity, weight_words=weight_words, state_words=state_words)

    return bisect.bisect_right(range(1, most + 1), budget_bytes, key=size_bytes)


def size_bytes_of(policy: str, capacity: int, *, weight_words: int, state_words: int) -> int:
    """Bytes of a cache of this capacity: rows, index and policy.
    ValueError, TypeError: unknown policy, or a number that is negative or none."""
    for name, number in (("capacity", capacity), ("weight_words", weight_words), ("state_words", state_words)):
        _require_int(number, name, 0, _NUMBER_MAX)
    rows = _arena_bytes(capacity, weight_words) + _arena_bytes(capacity, state_words)
    return rows + _overhead_bytes_of(capacity, _checked(policy))
