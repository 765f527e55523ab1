"""The hash index against a dict, on ordinary keys and on keys made to collide."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernel_calls import from_python
from tierstore.cache import index as kernels
from tierstore.cache.index import ABSENT, SLOT_DTYPE, index_places

pytestmark = pytest.mark.kernel

index_erase = from_python(kernels.index_erase)
index_find = from_python(kernels.index_find)
index_insert = from_python(kernels.index_insert)

MASK = 2**64 - 1
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CAPACITY = 10
PLACES = index_places(CAPACITY)


def undo_xorshift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift + 1):
        result = value ^ (result >> shift)
    return result


def key_with(fingerprint: int, rest: int) -> int:
    """A key of this fingerprint; another ``rest`` gives another key."""
    value = fingerprint << 32 | rest
    value = undo_xorshift((value * pow(MIX_B, -1, 2**64)) & MASK, 27)
    value = undo_xorshift((value * pow(MIX_A, -1, 2**64)) & MASK, 30)
    return value - 2**64 if value >= 2**63 else value


def fingerprint_at(place: int) -> int:
    """The lowest fingerprint whose home is this place of a table of PLACES."""
    return -(-(place << 32) // PLACES)


colliding_keys = st.builds(
    key_with,
    # The last places and the first, so that runs wrap around; two fingerprints at each, so that some are equal.
    st.builds(
        lambda place, step: fingerprint_at(place) + step,
        st.sampled_from([0, 1, 2, PLACES - 2, PLACES - 1]),
        st.integers(0, 1),
    ),
    st.integers(0, 3),
)


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000, 2**31 - 2])
def test_a_third_of_the_places_is_empty(capacity: int) -> None:
    assert index_places(capacity) > capacity * 1.5
    assert index_places(capacity) < capacity * 1.5 + 3


AROUND_THE_END = [key_with(fingerprint_at(PLACES - 1), rest) for rest in range(4)]


@example([(action, key) for action in ("insert", "find", "erase") for key in AROUND_THE_END])
@given(
    st.lists(st.tuples(st.sampled_from(["insert", "erase", "find"]), colliding_keys | st.integers(-5, 5)), max_size=60)
)
def test_index_is_a_dict(steps: list[tuple[str, int]]) -> None:
    index = np.zeros(PLACES, np.uint64)
    slots = np.zeros(CAPACITY + 1, SLOT_DTYPE)
    model: dict[int, int] = {}
    for action, key in steps:
        if action == "insert" and key not in model and len(model) < CAPACITY:
            slot = next(each for each in range(CAPACITY) if each not in model.values())
            slots[slot]["key"] = key
            index_insert(index, np.int64(key), np.int64(slot))
            model[key] = slot
        elif action == "erase" and key in model:
            index_erase(index, np.int64(key), np.int64(model.pop(key)))
        assert index_find(index, slots, np.int64(key)) == model.get(key, ABSENT)
        assert np.count_nonzero(index) == len(model)
        for each, slot in model.items():
            assert index_find(index, slots, np.int64(each)) == slot
