"""Lookahead against Belady's optimum, found by looking at the whole future; and what is announced, bounded."""

from itertools import pairwise

import numpy as np
import pytest

from tests.conformance.row_cache import keys_from
from tierstore.cache import Admission, AdmitStatus, DdrCache
from tierstore.cache.books import MAX_BATCHES, USES_PER_ROW
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.jit import JIT_ENABLED


def lookahead_cache(capacity: int) -> DdrCache:
    return DdrCache(capacity, weight_words=0, state_words=0, policy="lookahead")


def belady_misses(batches: list[set[int]], capacity: int) -> int:
    """The fewest rows brought in, rows of a batch all at once: whatever is used last leaves first."""
    resident: set[int] = set()
    misses = 0
    for number, batch in enumerate(batches):
        misses += len(batch - resident)
        resident |= batch
        later = batches[number + 1 :]

        def next_use(key: int, later: list[set[int]] = later) -> int:
            return next((distance for distance, use in enumerate(later) if key in use), len(later))

        victims = sorted(resident - batch, key=next_use, reverse=True)
        resident -= set(victims[: max(0, len(resident) - capacity)])
    return misses


def train(cache: DdrCache, batches: list[Int64s], lookahead: int) -> None:
    """A loop that announces that many batches ahead."""
    numbers = [cache.announce(keys) for keys in batches[:lookahead]]
    for step, keys in enumerate(batches):
        numbers += [cache.announce(ahead) for ahead in batches[step + lookahead : step + lookahead + 1]]
        admission = Admission(keys)
        assert cache.admit(admission) is AdmitStatus.COMPLETE
        cache.filled(admission.missing_slots)
        cache.retire(numbers[step])
        cache.unpin(admission.slots)
        cache.check_integrity()
    assert 0 not in numbers


@pytest.mark.kernel
@pytest.mark.parametrize("seed", range(10))
def test_with_all_the_future_known_it_is_beladys_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.zipf(1.2, 6).astype(np.int64) % 60 for _ in range(15)]
    cache = lookahead_cache(20)
    train(cache, batches, lookahead=15)
    assert cache.counters().misses == belady_misses([set(keys.tolist()) for keys in batches], 20)


@pytest.mark.kernel
def test_more_lookahead_brings_fewer_rows_in() -> None:
    rng = np.random.default_rng(3)
    capacity, num = (400, 200) if JIT_ENABLED else (60, 60)
    batches = [rng.zipf(1.1, capacity // 10).astype(np.int64) % (8 * capacity) for _ in range(num)]
    misses = []
    for lookahead in (0, 2, 10, 40):
        cache = lookahead_cache(capacity)
        train(cache, batches, lookahead)
        misses.append(cache.counters().misses)
    assert all(after < before for before, after in pairwise(misses)), misses


@pytest.mark.kernel
def test_uses_and_batches_are_bounded() -> None:
    cache = lookahead_cache(2)
    full = USES_PER_ROW * 2
    assert cache.announce(np.arange(full + 1, dtype=np.int64)) == 0
    assert not cache.can_announce(full + 1)
    number = cache.announce(np.arange(full, dtype=np.int64))
    assert number == 1
    assert cache.announce(keys_from(1)) == 0
    cache.retire(number)
    cache.retire(number)
    assert [cache.announce(keys_from()) for _ in range(MAX_BATCHES)] == [*range(2, MAX_BATCHES + 1), 0]
    for batch in range(2, MAX_BATCHES + 1):
        cache.retire(batch)
    assert cache.can_announce(full)
    cache.check_integrity()
