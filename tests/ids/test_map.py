"""The map from id to row, beside a dict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ids import id_map
from tierstore.ids.id_map import IdMap, absent, give_rows, lowest, map_bytes
from tierstore.kernels.threads import Workers

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


class EveryThread(Workers):
    """However little there is to do."""

    def parts(self, work: int) -> int:  # noqa: ARG002
        return self.threads


@given(
    capacity=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([4, 1000, 2**62]),
    threads=st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_finds_what_was_inserted_and_not_removed(capacity: int, seed: int, spread: int, threads: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.unique(np.append(generator.integers(-spread, spread, 2 * capacity), EDGES))
    made, known, workers = IdMap(capacity), dict[int, int](), EveryThread(threads)
    for step in range(1, 20):
        score = step * int(generator.integers(0, 2))
        found = made.find(ids, workers, score=score)
        assert found.tolist() == [known.get(each, -1) for each in ids.tolist()]
        assert not score or (made.scores(found[found >= 0]) == score).all()
        new = generator.permutation(ids[found < 0])[: generator.integers(0, made.num_free + 1)]
        rows = made.free_rows(len(new))
        made.put(rows, new, np.ones(len(new), np.uint32), workers)
        known |= dict(zip(new.tolist(), rows.tolist(), strict=True))
        assert len(set(known.values())) == len(known) == made.num_used
        gone = generator.permutation(made.used_rows)[: generator.integers(0, made.num_used + 1)]
        for each in made.ids[gone].tolist():
            del known[each]
        made.remove(gone, workers)
        made.check_integrity()
    workers.close()


@given(capacity=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), most=st.sampled_from([1, 3, 2**31 - 1]))
def test_victims_are_the_lowest_that_are_not_kept(capacity: int, seed: int, most: int) -> None:
    generator = np.random.default_rng(seed)
    made = IdMap(capacity)
    rows = made.free_rows(int(generator.integers(1, capacity + 1)))
    ids = generator.permutation(2 * capacity)[: len(rows)]
    scores = generator.integers(1, most, len(rows), endpoint=True).astype(np.uint32)
    made.put(rows, ids, scores)
    kept = generator.permutation(rows)[: generator.integers(0, len(rows) + 1)]
    wanted = int(generator.integers(1, capacity + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_map, "_SAMPLED_ROWS", 16)
        patch.setattr(id_map, "_SCANNED_ROWS", 64)
        found = made.victims(wanted, [kept, kept])
    others = sorted((int(made.scores(np.array([row]))[0]), int(made.ids[row])) for row in set(rows) - set(kept))
    assert sorted(made.ids[found].tolist()) == sorted(each for _, each in others[:wanted])
    assert made.victims(capacity, []).tolist() == rows.tolist()


def test_bytes_an_id() -> None:
    made = IdMap(1000)
    assert made._records.nbytes + made._flags.nbytes + made._index.nbytes == map_bytes(1000) <= 20 * 1000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), unique=True, min_size=1), st.integers(0, 60))
def test_lowest(rows: list[tuple[int, int]], count: int) -> None:
    scores, ids = (np.array(column) for column in zip(*rows, strict=True))
    chosen = lowest(np.arange(len(rows)), scores.astype(np.uint32), ids, count)
    assert sorted(rows[place] for place in chosen.tolist()) == sorted(rows)[:count]


@given(st.lists(st.integers(-3, 3)))
def test_absent_ids_are_numbered_in_order_of_first_use(batch: list[int]) -> None:
    wanted = np.array(batch, np.int64)
    rows = np.array([7 if each % 2 else -1 for each in wanted], np.int64)
    new, counts = absent(wanted, rows)
    missing = [each for each in wanted.tolist() if each % 2 == 0]
    assert new.tolist() == list(dict.fromkeys(missing))
    assert counts.tolist() == [missing.count(each) for each in new.tolist()]
    given_rows = np.array([-1 if each == 0 else each + 100 for each in new], np.int64)
    give_rows(rows, given_rows)
    assert rows.tolist() == [7 if each % 2 else -1 if each == 0 else each + 100 for each in wanted.tolist()]
