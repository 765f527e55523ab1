"""The map from id to row, beside a dict."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ids import id_map
from tierstore.ids.id_map import IdMap, map_bytes
from tierstore.kernels.arrays import Bools, Int64s
from tierstore.kernels.threads import Workers

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


class EveryThread(Workers):
    """However little there is to do; one range of places after another, each of which alone may change."""

    index: Any = None

    def run(self, work: Callable[[int, int], Any], bounds: Sequence[int]) -> None:
        for begin, end in pairwise(bounds):
            before, size = self.index.copy(), len(self.index)
            work(begin, end)
            changed = np.flatnonzero(self.index != before)
            assert all(begin <= place + (size if place < begin else 0) < end for place in changed.tolist())

    def parts(self, work: int) -> int:
        return self.threads


@given(
    capacity=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([4, 1000, 2**62]),
    threads=st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_finds_what_was_inserted_and_not_removed(capacity: int, seed: int, spread: int, threads: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.unique(np.append(generator.integers(-spread, spread, 2 * capacity), EDGES))
    workers, known = EveryThread(threads), dict[int, int]()
    made = IdMap(capacity, workers)
    workers.index = made._index
    for step in range(1, 20):
        score = step * int(generator.integers(0, 2))
        found = made.find(ids, score=score)
        assert found.tolist() == [known.get(each, -1) for each in ids.tolist()]
        assert not score or (made.scores(found[found >= 0]) == score).all()
        new = generator.permutation(ids[found < 0])[: generator.integers(0, made.num_free + 1)]
        rows = made.free_rows(len(new))
        made.put(rows, new, np.ones(len(new), np.uint32))
        known |= dict(zip(new.tolist(), rows.tolist(), strict=True))
        assert len(set(known.values())) == len(known) == made.num_used
        gone = generator.permutation(made.used_rows)[: generator.integers(0, made.num_used + 1)]
        for each in made.ids[gone].tolist():
            del known[each]
        made.remove(gone)
        made.check_integrity()
    workers.close()


def _chosen(made: IdMap, spared: set[int], rows: Int64s) -> Bools:
    return np.array([each not in spared for each in made.ids[rows].tolist()], np.bool_)


@given(
    capacity=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), highest=st.sampled_from([1, 3, 400, 2**30 - 1]),
    is_rising=st.booleans(),
)  # fmt: skip
def test_evicted_are_the_lowest_that_are_not_kept(capacity: int, seed: int, highest: int, is_rising: bool) -> None:
    generator = np.random.default_rng(seed)
    made, known, most = IdMap(capacity), dict[int, int](), 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_map, "_SAMPLED_ROWS", 16)
        patch.setattr(id_map, "_BUCKETS", 5)
        for step in range(12):
            new = generator.integers(0, 2**62, int(generator.integers(0, made.num_free + 1)))
            lowest_new = 2 + step if is_rising else 1
            scores = generator.integers(lowest_new, max(lowest_new, highest), len(new), endpoint=True).astype(np.uint32)
            made.put(made.free_rows(len(new)), new, scores)
            known |= dict(zip(new.tolist(), scores.tolist(), strict=True))
            used = generator.permutation(made.used_rows)[: made.num_used // 3]
            if not is_rising:
                made.count_uses(used)
                known |= {each: min(known[each] + 1, 2**30 - 1) for each in made.ids[used].tolist()}
            if len(used) and generator.integers(0, 2):
                raised = made.ids[used[: len(used) // 2]]
                made.find(raised, score=2**29 + step)
                known |= dict.fromkeys(raised.tolist(), 2**29 + step)
            kept = generator.permutation(made.used_rows)[: generator.integers(0, made.num_used + 1)]
            most = max(most, int(generator.choice([1, highest, 2**30 - 1])))
            wanted = int(generator.integers(1, capacity // 8 + 2 if is_rising else capacity + 1))
            may_go = set(known) - set(made.ids[kept].tolist())
            lowest_first = sorted((known[each], each) for each in may_go if known[each] <= most)
            spared = {each for _, each in lowest_first[:: int(generator.integers(1, 5))]}
            chosen = partial(_chosen, made, spared if step % 3 else set())
            rows = made.evict(wanted, [kept, kept], chosen, most=most)
            gone = made.ids[rows].tolist()
            by_score = [(known[each], row) for each, row in zip(gone, rows.tolist(), strict=True)]
            assert by_score == sorted(by_score)
            expected = [each for _, each in lowest_first[:wanted] if not step % 3 or each not in spared]
            assert sorted(gone) == sorted(expected)
            for each in gone:
                del known[each]
            made.check_integrity()


def test_a_queue_that_memory_was_short_for_is_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    made, everyone = IdMap(5000), lambda rows: np.ones(len(rows), np.bool_)
    made.put(made.free_rows(5000), np.arange(5000), np.repeat(np.arange(1, 51, dtype=np.uint32), 100))
    assert len(made.evict(3, [], everyone)) == 3
    with monkeypatch.context() as patch:
        patch.setattr(id_map, "queue_up_to", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            made.evict(2000, [], everyone)
    assert made.ids[made.evict(2000, [], everyone)].tolist() == list(range(3, 2003))
    made.check_integrity()


def test_bytes_an_id() -> None:
    made = IdMap(1000)
    rows = made.free_rows(1000)
    made.put(rows, rows, np.arange(1, 1001, dtype=np.uint32))
    made.evict(1, [], partial(_chosen, made, set()))
    assert made._records.nbytes + made._index.nbytes + 4 * 250 == map_bytes(1000) <= 20 * 1000
    assert abs(len(made._queue) - 250) < 4
