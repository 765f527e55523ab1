"""The hash table against a dict, on ordinary keys and keys made to collide; and numbers chosen to collide, by those who
know all but the secret, lie in any table like others."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.calls import from_python
from tierstore.cache.ddr import DdrCache
from tierstore.ids.id_map import IdMap
from tierstore.io import reads
from tierstore.kernels import hash_table
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.hash_table import ABSENT, num_places
from tierstore.kernels.hashing import SECRET, keyed_hash, mix64
from tierstore.kernels.slots import unique_in_order
from tierstore.pool import joined

erase, find, insert = (from_python(getattr(hash_table, name)) for name in ("erase", "find", "insert"))
hashed, count_pages = from_python(keyed_hash), from_python(reads.count_pages)
COUNT, MASK = 1500, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
CAPACITY = 10
PLACES = num_places(CAPACITY)


def undo_xorshift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift + 1):
        result = value ^ (result >> shift)
    return result


def key_of_hash(value: int, secret: int = 0) -> int:
    """The int64 that ``keyed_hash`` makes this word of."""
    value = undo_xorshift(value, 31)
    value = undo_xorshift(value * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
    value = undo_xorshift(value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30) ^ secret
    return value - 2**64 if value >= 2**63 else value


def key_at(place: int, rest: int, places: int = PLACES, secret: int = 0) -> int:
    """A key whose home is that place; another ``rest`` gives another key."""
    return key_of_hash(-(-(place << 32) // places) << 32 | rest, secret)


TAG_AND_MORE = [0, 1 << 4, 1 << 30, 1 << 31]  # all but the second have one tag
colliding_keys = st.builds(key_at, st.sampled_from([0, 1, 2, PLACES - 2, PLACES - 1]), st.sampled_from(TAG_AND_MORE))
AROUND_THE_END = [key_at(PLACES - 1, rest << 29 | (rest & 1) << 4) for rest in range(6)]


def test_places_are_empty_in_every_table() -> None:
    for capacity in (1, 2, 3, 1000, 2**31 - 2):
        assert capacity < num_places(capacity) <= max(2, 1.75 * capacity)


def hash_of(key: int) -> np.uint64:
    return np.uint64(hashed(np.int64(key), 0))


@pytest.mark.kernel
@example([(action, key) for action in ("insert", "find", "erase") for key in AROUND_THE_END], 31)
@given(
    st.lists(st.tuples(st.sampled_from(["insert", "erase", "find"]), colliding_keys | st.integers(-5, 5)), max_size=60),
    st.sampled_from([4, 30, 31]),
)
def test_the_table_is_a_dict(steps: list[tuple[str, int]], bits: int) -> None:
    index, records = np.zeros(PLACES, np.uint32), np.zeros(CAPACITY, [("key", np.int64)])
    model: dict[int, int] = {}
    for action, key in steps:
        if action == "insert" and key not in model and len(model) < CAPACITY:
            record = next(each for each in range(CAPACITY) if each not in model.values())
            records[record]["key"] = key
            assert insert(index, hash_of(key), np.int64(record), bits, 0, 2 * PLACES)
            model[key] = record
        elif action == "erase" and key in model:
            erase(index, records, hash_of(key), np.int64(model.pop(key)), bits, 0)
        assert np.count_nonzero(index) == len(model)
        for each in {key, *model}:
            assert find(index, records, np.int64(each), hash_of(each), bits) == model.get(each, ABSENT)


def chosen(hashes: Callable[[int], int]) -> Int64s:
    """Numbers of these hashes, were it not for the secret."""
    return np.array([key_of_hash(hashes(i)) for i in range(COUNT)], np.int64)


def of_map() -> Any:
    made = IdMap(COUNT)
    made.put(made.free_rows(COUNT), chosen(lambda i: i), np.ones(COUNT, np.uint32))
    return made._index


def of_cache() -> Any:
    cache = DdrCache(COUNT, weight_words=0, state_words=0, policy="lru")
    cache.access(chosen(lambda i: i))
    return cache._cache_state.entries


def of_batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    scratches: list[Any] = []

    def number(keys: Int64s, scratch: Any, *rest: Any) -> int:
        scratches.append(scratch)
        return unique_in_order(keys, scratch, *rest)

    monkeypatch.setattr(joined.kernels, "unique_in_order", number)
    features = joined.Features([SimpleNamespace(index=0)], [0, 1], np.zeros(1, np.int32))
    keys = chosen(lambda i: i << 32)
    assert len(joined.Joined(features, 1, np.arange(2), keys=keys).distinct[1]) == COUNT
    return scratches[0] + 1


def of_pages() -> Any:
    pages = np.array([i << 20 | i << 3 for i in range(1, COUNT + 1)])  # equal by page ^ page >> 17, modulo 4096
    seen = reads.new_seen(2**40, COUNT)
    assert count_pages(512, 1, 2**40, pages * 512, seen, SECRET) == COUNT
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
    base = key_of_hash(0)
    for other in (base ^ -1 << 63, base ^ 3 << 40, base ^ 1 << 33 ^ 1 << 3, key_of_hash(1), key_of_hash(1 << 32)):
        for shift in (0, 56):
            one, two = ([int(hashed(key, each)) >> shift & 255 for each in secrets] for key in (base, other))
            assert sum(map(int.__eq__, one, two)) < 30, "8 are expected"
    assert key_of_hash(int(hashed(12345, SECRET)), SECRET) == 12345
    assert int(mix64(np.uint64(12345))) == int(hashed(12345 + GOLDEN - 2**64, 0))
