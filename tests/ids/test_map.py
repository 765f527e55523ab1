"""The map from id to row, beside a dict."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ids.id_map import IdMap, lowest, map_bytes

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


@given(capacity=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([4, 1000, 2**62]))
def test_finds_what_was_inserted_and_not_removed(capacity: int, seed: int, spread: int) -> None:
    generator = np.random.default_rng(seed)
    ids = np.unique(np.append(generator.integers(-spread, spread, 2 * capacity), EDGES))
    made, known = IdMap(capacity), dict[int, int]()
    for _ in range(20):
        found = made.find(ids)
        assert found.tolist() == [known.get(each, -1) for each in ids.tolist()]
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


def test_bytes_an_id() -> None:
    made = IdMap(1000)
    arrays = (made.ids, made.scores, made.flags, made._index)
    assert sum(each.nbytes for each in arrays) == map_bytes(1000) <= 20 * 1000


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), unique=True, min_size=1), st.integers(0, 60))
def test_lowest(rows: list[tuple[int, int]], count: int) -> None:
    scores, ids = (np.array(column) for column in zip(*rows, strict=True))
    chosen = lowest(scores.astype(np.uint32), ids, count)
    assert sorted(rows[place] for place in chosen.tolist()) == sorted(rows)[:count]
