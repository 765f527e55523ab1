"""A cold tier's counters, added to by many threads."""

import threading

from .base import ColdCounters

__all__ = ["Counting"]


class Counting:
    """Running totals.

    Attributes:
        totals: so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.totals = ColdCounters(0, 0, 0, 0.0, 0, 0, 0.0)

    def add(self, **added: float) -> None:
        """Add to the totals of these names, all at once."""
        with self._lock:
            sums = {name: getattr(self.totals, name) + more for name, more in added.items()}
            self.totals = self.totals._replace(**sums)
