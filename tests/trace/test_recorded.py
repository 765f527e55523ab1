"""The bounded memory of a recording: whatever comes, it holds all lookups of the rows that its rate leaves."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Batch, Feature, check, random_batch
from tierstore.trace.recorded import Recorded
from tierstore.trace.sampling import ALL, is_sampled, last_hash

INDEXES = {"a": 0, "b": 1, "c": 2}
ROWS = {"a": 2000, "b": 60, "c": 3}


def add(recorded: Recorded, batch: Batch, last: np.uint64 | None = None) -> None:
    """As a recorder does: what is sampled at the rate of now, or at one of before."""
    keys = [INDEXES[table] << 40 | row for table, ids, _ in batch.features for row in ids]
    samples = [s for _, _, lengths in batch.features for s, length in enumerate(lengths) for _ in range(length)]
    last = recorded.last if last is None else last
    found = np.array(keys, np.int64)
    kept = np.ones(len(found), np.bool_) if last == ALL else is_sampled(found, (int(last) + 1) / 2**64)
    counts = np.bincount(found >> 40, minlength=len(recorded.tables))
    recorded.add(found[kept], np.array(samples, np.int64)[kept], batch.samples, last, counts)


@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(1, 40), max_size=30),
    rate=st.sampled_from([1.0, 0.7, 0.1, 0.001]),
    max_bytes=st.sampled_from([100, 500, 2000, 10_000, 60_000]),
)
def test_a_recording_is_a_filter_of_what_was_looked_up(
    seed: int, sizes: list[int], rate: float, max_bytes: int
) -> None:
    generator = np.random.default_rng(seed)
    recorded = Recorded(list(INDEXES), rate=rate, max_bytes=max_bytes)
    log: list[Batch] = []
    for size in sizes:
        log.append(random_batch(generator, ROWS, size))
        before = recorded.rate
        add(recorded, log[-1])
        assert recorded.size_bytes <= max_bytes
        assert before / recorded.rate in {2.0**k for k in range(64)}
        assert recorded.last == last_hash(recorded.rate)
    trace = recorded.trace()
    assert trace.sampling_rate == recorded.rate
    check(trace, log, INDEXES)


def test_the_rate_is_halved_only_when_it_must_be() -> None:
    recorded = Recorded(list(INDEXES), rate=1.0, max_bytes=1 << 16)
    generator = np.random.default_rng(0)
    while recorded.rate == 1:
        held = recorded.size_bytes
        batch = random_batch(generator, ROWS, 50)
        add(recorded, batch)
    # 12 bytes for each id, 8 for each sample in the offsets of each table, and in the batches' starts.
    took = 12 * sum(len(feature.ids) for feature in batch.features) + 8 * 4 * batch.samples
    assert held <= 1 << 16 < held + took
    assert recorded.rate == 0.5


def test_what_was_sampled_before_the_rate_was_halved_is_sampled_again() -> None:
    """Two threads: one samples, the other's batch halves the rate, the first adds."""
    generator = np.random.default_rng(1)
    recorded = Recorded(list(INDEXES), rate=1.0, max_bytes=3000)
    log = [random_batch(generator, ROWS, size) for size in (40, 2, 2)]
    add(recorded, log[0])
    rate = recorded.rate
    for batch in log[1:]:
        add(recorded, batch, last=ALL)
    assert recorded.rate == rate < 1  # there was room
    check(recorded.trace(), log, INDEXES)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_halving_takes_no_more_memory_than_there_may_be(rate: float) -> None:
    generator, max_bytes = np.random.default_rng(4), 1 << 20
    recorded = Recorded(["a"], rate=rate, max_bytes=max_bytes)
    while recorded.rate == rate:
        keys = generator.integers(0, 1 << 20, 2000)
        keys, counts = keys[is_sampled(keys, rate)], np.array([2000])
        tracemalloc.start()
        recorded.add(keys, np.zeros(len(keys), np.int32), 1, recorded.last, counts)
        took = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert took <= max_bytes


def test_a_new_table_counts() -> None:
    recorded = Recorded(["a"], rate=0.5, max_bytes=4000)
    log = [Batch(1, [Feature("a", list(range(20)), [20])])]
    add(recorded, log[0])
    before = recorded.size_bytes
    recorded.add_table("b")
    assert recorded.size_bytes == before + 8
    log.append(Batch(1, [Feature("b", list(range(20)), [20])]))
    add(recorded, log[1])
    check(recorded.trace(), log, {"a": 0, "b": 1})
