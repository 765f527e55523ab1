"""Public functions of the caches refuse wrong arguments, in words; none hangs or gives memory of any content."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tierstore import cache
from tierstore.cache import Admission, DdrCache, FullCache, Listing

pytestmark = pytest.mark.kernel

KEYS = np.arange(6)
WORDS = {"weight_words": 2, "state_words": 1}


def _lru() -> DdrCache:
    made = DdrCache(4, policy="lru", **WORDS)
    made.admit(Admission(KEYS[:2]))
    return made


def _access(*starts: int, **others: Any) -> Callable[[], Any]:
    return lambda: DdrCache(4, policy="tinylfu", **WORDS).access(KEYS, np.array(starts, np.int64), **others)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a depth below 0": (_access(0, 3, 6, depth=-1), r"depth=-1 must be in \[0"),
    "a depth that is none": (_access(0, 6, depth=1.5), "depth must be an int, not float"),
    "held rows below 0": (_access(0, 6, held_rows=-2), "held_rows=-2"),
    "starts that end before": (_access(0, 3), "starts must ascend from 0 to the number of keys, 6"),
    "starts that end behind": (_access(0, 7), "starts must ascend"),
    "starts that begin behind": (_access(1, 6), "starts must ascend"),
    "starts that descend": (_access(0, 4, 2, 6), "starts must ascend"),
    "no starts": (_access(), "starts must ascend"),
    "starts that are none": (lambda: _lru().access(KEYS, [0, 6]), "starts must be a numpy array"),  # type: ignore[arg-type]
    "keys that are none": (lambda: _lru().access(KEYS.astype(np.int32)), r"keys must be a numpy array, int64 \[n\]"),
    "victims below 0": (lambda: _lru().victims(-1, 1), "count=-1"),
    "a listing of nothing": (lambda: _lru().list_more(Listing(), 0), "limit=0"),
    "likewise": (lambda: FullCache({0: range(4)}, **WORDS).list_more(Listing(), -1), "limit=-1"),
    "no capacity": (lambda: cache.make_cache("lru", 0, **WORDS), "capacity=0"),
    "no policy": (lambda: cache.make_cache("mru", 4, **WORDS), "'mru'"),
    "words below 0": (lambda: cache.make_cache("lru", 4, weight_words=-1, state_words=0), "weight_words=-1"),
    "likewise, of a budget": (
        lambda: cache.capacity_for("lru", 999, weight_words=-9, state_words=0),
        "weight_words=-9",
    ),
    "a size below 0": (lambda: cache.size_bytes_of("lru", -4, **WORDS), "capacity=-4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_refused(what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=words):
        call()
