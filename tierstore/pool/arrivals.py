"""Which rows came into a cache while a newer version is made ready."""

from collections.abc import Callable
from typing import Final

import numpy as np

from ..cache import RowCache
from ..kernels.arrays import Bools, Int64s

IsChanged = Callable[[Int64s], Bools]
"""Whether rows (int64 keys) are others in the newer version: bool [n]."""
_STEP: Final = 1 << 20
_MAX_ARRIVALS: Final = 1 << 16


class Arrivals:
    """Rows that entered a cache from the version shown, and differ in the newer one.

    If there are too many to note, they are found by a scan of the whole cache.
    """

    def __init__(self, is_changed: IsChanged) -> None:
        self._is_changed = is_changed
        self._parts: list[Int64s] | None = []
        self._count = 0

    def add(self, keys: Int64s) -> None:
        """Note those of ``keys`` that are others."""
        if self._parts is None:
            return
        changed = keys[self._is_changed(keys)]
        self._count += len(changed)
        if self._count > _MAX_ARRIVALS:
            self._parts = None
        elif len(changed):
            self._parts.append(changed)

    def keys(self, cache: RowCache) -> Int64s:
        """int64: all of them, and maybe others that changed."""
        parts = self._parts
        if parts is None:
            keys = cache.keys_of(cache.resident_slots())
            steps = (keys[first : first + _STEP] for first in range(0, len(keys), _STEP))
            parts = [step[self._is_changed(step)] for step in steps]
        return np.concatenate([np.empty(0, np.int64), *parts])
