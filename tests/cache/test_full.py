"""The cache in which every row has a slot of its own, against the reference cache with as many slots."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.reference import ReferenceCache
from tests.conformance.row_cache import take
from tierstore.cache.base import Admission, AdmitStatus, RowCache
from tierstore.cache.full import FullCache
from tierstore.layout import KEY_ROW_BITS

pytestmark = pytest.mark.kernel
TABLES = {4: range(5), 1: range(10, 13), 7: range(1, 5)}
KEYS = np.array([table << KEY_ROW_BITS | row for table, rows in TABLES.items() for row in rows], np.int64)
CHANGES = ["mark_dirty", "use", "evict", "filled", "settle", "take", "thaw"]


def full_cache() -> FullCache:
    return FullCache(TABLES, weight_words=2, state_words=1)


def admit(cache: RowCache, keys: Any) -> None:
    admission = Admission(keys)
    cache.admit(admission)
    cache.filled(admission.missing_slots)
    cache.release(admission)


def outcome(cache: RowCache, action: str, keys: Any) -> Any:
    """Keys that a call gives back, or that it was refused."""
    try:
        if action == "take":
            cache.release(take(cache, cache.find(keys)))
            return None
        given = getattr(cache, action)(*([] if keys is None else [keys if action == "use" else cache.find(keys)]))
    except AssertionError:
        return "refused"
    return None if given is None else sorted(cache.keys_of(given).tolist())


def seen(cache: RowCache) -> Any:
    """What anybody can see of a cache, by key."""
    unclean = np.concatenate([cache.dirty_slots(), cache.frozen_slots()])
    return (
        cache.num_resident, cache.num_dirty, cache.num_frozen, cache.num_pinned, cache.counters(),
        (cache.find(KEYS) >= 0).tolist(), sorted(cache.keys_of(unclean).tolist()),
        sorted(cache.keys_of(cache.frozen_slots()).tolist()), sorted(cache.keys_of(cache.resident_slots()).tolist()),
        cache.is_loading(cache.resident_slots()),
    )  # fmt: skip


some_keys = st.lists(st.sampled_from(KEYS.tolist()), max_size=8).map(lambda keys: np.array(keys, np.int64))
one_key = st.sampled_from(KEYS.tolist()).map(lambda key: np.array([key], np.int64))
steps = st.one_of(
    st.tuples(st.sampled_from(["admit", "abandon", "reserve"]), some_keys),
    st.tuples(st.sampled_from(CHANGES), one_key),
    st.tuples(st.sampled_from(["freeze", "unfreeze"]), st.none()),
)


@settings(max_examples=200)
@given(script=st.lists(steps, max_size=15), again=st.lists(steps, min_size=15, max_size=40))
def test_it_does_as_the_reference_cache_does(script: list[tuple[str, Any]], again: list[tuple[str, Any]]) -> None:
    caches: list[RowCache] = [
        full_cache(),
        ReferenceCache(len(KEYS), weight_words=2, state_words=1, policy="lru"),
    ]
    for action, keys in [*script, ("admit", KEYS), ("mark_dirty", KEYS[3:4]), ("mark_dirty", KEYS[4:5]), *again]:
        if action in {"admit", "abandon", "reserve"}:
            order = np.argsort(keys % 7, kind="stable").astype(np.int32)
            admissions = [Admission(keys, order), Admission(keys[order])]
            for cache, admission in zip(caches, admissions, strict=True):
                assert cache.admit(admission) == AdmitStatus.COMPLETE
                if action == "admit":
                    cache.filled(admission.missing_slots)
                    unique = admission.progress.tolist()
                    cache.release(admission)
                    admission.progress[:] = unique
                elif action == "abandon":
                    cache.release(admission)
            one, other = admissions
            assert one.consumed == other.consumed
            assert one.inverse[order[: one.consumed]].tolist() == other.inverse[: other.consumed].tolist()
            assert one.missing[: one.num_missing].tolist() == order[other.missing[: other.num_missing]].tolist()
        elif keys is not None and (caches[1].find(keys) < 0).any():
            continue
        elif action == "freeze" and caches[1].num_frozen:
            assert outcome(caches[0], action, keys) == "refused"
            continue
        else:
            found = [outcome(cache, action, keys) for cache in caches]
            assert found[0] == found[1], (action, keys)
        assert seen(caches[0]) == seen(caches[1])
        for cache in caches:
            cache.check_integrity()


def test_rows_lie_table_by_table() -> None:
    cache = full_cache()
    slots = np.arange(12, dtype=np.int32)
    keys = cache.numbering.keys_at(slots)
    assert keys.tolist() == [table << KEY_ROW_BITS | row for table in (1, 4, 7) for row in TABLES[table]]
    assert cache.numbering.first_slots(np.array([1, 4, 7])).tolist() == [0 - 10, 3, 8 - 1]
    admit(cache, keys)
    assert cache.find(keys).tolist() == slots.tolist()
    assert cache.is_complete


def test_keys_of_no_row_are_not_found_and_not_admitted() -> None:
    cache = full_cache()
    admit(cache, KEYS)
    others = [(1, 13), (1, 9), (7, 0), (2, 0), (8, 0)]
    strangers = np.array([*(table << KEY_ROW_BITS | row for table, row in others), -1])
    assert cache.find(strangers).tolist() == [-1] * 6
    assert cache.find(np.array([*strangers, 1 << KEY_ROW_BITS | 10], np.int64)).tolist() == [-1] * 6 + [0]
    with pytest.raises(AssertionError, match="no row"):
        cache.admit(Admission(strangers[:1]))


def test_absent_rows_are_told_from_those_that_are_in() -> None:
    cache = full_cache()
    admission = Admission(cache.numbering.keys_at(np.array([5, 2], np.int32)))
    cache.admit(admission)
    asked = np.array([2, 5, 7, 7, 5], np.int32)
    assert not cache.are_in(asked)
    assert cache.absent(asked).tolist() == [2, 5, 7], "a row that is loading is not in"
    cache.filled(admission.missing_slots)
    assert cache.are_in(asked[:2])
    assert cache.absent(asked).tolist() == [7]
