"""The rows in memory, listed while others look up: the lock is free between pieces, and each row is in once."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.cache.base import Admission, AdmitStatus, Listing
from tierstore.cache.ddr import DdrCache
from tierstore.store import refresh
from tierstore.store.refresh import resident_keys

pytestmark = pytest.mark.kernel
PIECE = 8
POLICIES = ["lru", "lfu", "tinylfu"]


def pool_over(cache: Any) -> Any:
    return SimpleNamespace(cache=cache, arena=SimpleNamespace(lock=threading.RLock()))


def list_all(cache: Any, between: Callable[[], None] = lambda: None, limit: int = PIECE) -> list[int]:
    found = Listing()
    while cache.list_more(found, limit):
        between()
    return found.keys().tolist()


def visit(cache: Any, keys: Any) -> None:
    admission = Admission(np.asarray(keys, np.int64))
    assert cache.admit(admission) == AdmitStatus.COMPLETE
    cache.filled(admission.missing_slots)
    cache.unpin(admission.slots)


def cache_of(policy: str, capacity: int = 100) -> DdrCache:
    cache = DdrCache(capacity, weight_words=1, state_words=0, policy=policy)
    random = np.random.default_rng(7)
    for _ in range(30):
        visit(cache, random.zipf(1.3, 20) % 300)
    return cache


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_stay_are_listed_whatever_moves(policy: str) -> None:
    """Between any two pieces rows are used, some leave and others come, at random."""
    random = np.random.default_rng(3)
    for _ in range(20):
        cache = cache_of(policy)
        stayed = set(cache.keys_of(cache.resident_slots()).tolist())
        came = set(stayed)

        def disturb(cache: DdrCache = cache, stayed: set[int] = stayed, came: set[int] = came) -> None:
            visit(cache, random.zipf(1.2, random.integers(1, 12)) % 1000)
            now = set(cache.keys_of(cache.resident_slots()).tolist())
            stayed &= now
            came |= now

        found = list_all(cache, disturb)
        assert stayed <= set(found) <= came


# A pool's.


def test_each_row_is_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that leave one slot and come back into another are met twice."""
    cache = DdrCache(40, weight_words=1, state_words=0, policy="lru")
    visit(cache, np.arange(40))
    turns: list[None] = []

    def drive_out(_: float) -> None:
        if len(turns) < 3:
            visit(cache, np.arange(100 * len(turns) + 100, 100 * len(turns) + 120))
            visit(cache, np.arange(5))
        turns.append(None)

    monkeypatch.setattr(refresh, "_PIECE_ROWS", PIECE)
    monkeypatch.setattr(refresh.time, "sleep", drive_out)

    found = resident_keys(pool_over(cache))
    assert len(turns) > 3
    assert len(set(found.tolist())) == len(found)
    assert set(range(5)) <= set(found.tolist())
