"""Admitting keys to a row cache, and what it holds then."""

from typing import Any

import numpy as np

from tierstore.cache.base import Admission, AdmitStatus, Pinned
from tierstore.kernels.arrays import Int32s, Int64s


def keys_from(*values: int) -> Int64s:
    return np.array(values, np.int64)


def order_of(cache: Any) -> list[int]:
    """Keys, next victim first."""
    return cache.keys_of(cache.resident_slots()).tolist()


def fill(cache: Any, admission: Admission) -> None:
    """Its rows that were missing are in place."""
    cache.filled(admission.unique_slots[admission.inverse[admission.missing[: admission.num_missing]]])


def admitted(cache: Any, *values: int) -> Admission:
    admission = Admission(keys_from(*values))
    assert cache.admit(admission) == AdmitStatus.COMPLETE
    fill(cache, admission)
    return admission


def take(cache: Any, slots: Int32s) -> Pinned:
    pinned = Pinned(len(slots))
    cache.take(slots, pinned, frozen=False)
    cache.settle(pinned.slots)
    return pinned


def visit(cache: Any, *values: int) -> None:
    cache.release(admitted(cache, *values))
