"""Numbers chosen to collide, by whoever knows all but the secret, lie in hash tables like any others."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.cache import index
from tierstore.cache.cache_state import new_state
from tierstore.ids.id_map import IdMap
from tierstore.io import reads
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.hashing import SECRET, keyed_hash, mix64
from tierstore.kernels.jit import kernel
from tierstore.kernels.slots import unique_in_order
from tierstore.pool import joined

COUNT, MASK = 1500, 2**64 - 1


def undo_xorshift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift + 1):
        result = value ^ (result >> shift)
    return result


def unmix(value: int, *, is_last: bool = True) -> int:
    """Inverse of ``mix64``; or of all but its first and last steps, which places keys in caches."""
    value = undo_xorshift(value, 31) if is_last else value
    value = undo_xorshift(value * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
    value = undo_xorshift(value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30)
    return (value - (0x9E3779B97F4A7C15 if is_last else 0)) & MASK


def chosen(hashed: Callable[[int], int], *, is_last: bool = True) -> Int64s:
    return np.array([unmix(hashed(i), is_last=is_last) for i in range(COUNT)], np.uint64).view(np.int64)


@kernel
def insert(entries: Any, keys: Int64s) -> None:
    for i in range(keys.size):
        index.index_insert(entries, keys[i], i)


@kernel
def count_pages(offsets: Int64s, seen: Any, secret: int) -> int:
    return reads.count_pages(512, 1, 2**40, offsets, seen, secret)


def of_map() -> Any:
    made = IdMap(COUNT)
    made.put(made.free_rows(COUNT), chosen(lambda i: i), np.ones(COUNT, np.uint32))
    return made._index


def of_cache() -> Any:
    state = new_state(COUNT, "lru")
    insert(state.entries, chosen(lambda i: i, is_last=False))
    return state.entries[:-1]


def of_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    scratches: list[Any] = []

    def number(keys: Int64s, scratch: Any, *rest: Any) -> int:
        scratches.append(scratch)
        return unique_in_order(keys, scratch, *rest)

    monkeypatch.setattr(joined.kernels, "unique_in_order", number)
    features = joined.Features([SimpleNamespace(index=0)], [0, 1], np.zeros(1, np.int32))
    assert len(joined.Joined(features, 1, np.arange(2), keys=chosen(lambda i: i << 32)).distinct[1]) == COUNT
    return scratches[0] + 1


def of_pages() -> Any:
    pages = np.array([i << 20 | i << 3 for i in range(1, COUNT + 1)])  # equal by page ^ page >> 17, modulo 4096
    seen = reads.new_seen(2**40, COUNT)
    assert count_pages(pages * 512, seen, SECRET) == COUNT
    return seen


@pytest.mark.parametrize("table", ["map", "cache", "batch", "pages"])
def test_chosen_numbers_do_not_pile_up(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_batch(monkeypatch) if table == "batch" else globals()[f"of_{table}"]()
    gaps = np.diff(np.flatnonzero(made == 0), prepend=-1)
    assert np.count_nonzero(made) == COUNT
    assert gaps.max() < COUNT / 4, "the longest run of taken places, which a probe may have to pass"


def test_differences_do_not_survive_the_secret() -> None:
    """Of numbers that differ in few bits, or before the last multiplication, as many collide as of any."""
    secrets = np.random.default_rng(0).integers(1, 2**62, 2000).tolist()
    base = unmix(0)
    for other in (base ^ 1 << 63, base ^ 3 << 40, base ^ 1 << 63 ^ 1 << 33 ^ 1 << 3, unmix(1), unmix(1 << 32)):
        pair = [np.uint64(base).astype(np.int64), np.uint64(other).astype(np.int64)]
        for shift in (0, 56):
            same = sum(_byte(pair[0], each, shift) == _byte(pair[1], each, shift) for each in secrets)
            assert same < 30, "8 are expected"
    assert unmix(int(mix64(np.uint64(12345)))) == 12345


@kernel
def _byte(number: int, secret: int, shift: int) -> Any:
    return keyed_hash(number, secret) >> np.uint64(shift) & np.uint64(255)
