"""The directory's own bookkeeping: places of tables, growth, and which blocks were written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.cold_tier import LONG, NARROW, WIDE
from tierstore.io.btree import META_KEY, Entries
from tierstore.io.directory import Directory, fill_pages, tally
from tierstore.rows import KEY_ROW_BITS

pytestmark = pytest.mark.kernel

TABLES = {4: (WIDE, 3000), 0: (NARROW, 200_000), 7: (LONG, 50)}


def _directory() -> Directory:
    directory = Directory()
    for table, (layout, num_rows) in TABLES.items():
        directory = directory.with_table(table, layout, num_rows)
    return directory


def _key(table: int, block: int) -> int:
    return (table << KEY_ROW_BITS) | block


def _entries(*rows: tuple[int, int, int, int]) -> Entries:
    columns = list(zip(*rows, strict=True))
    return Entries(*(np.array(c, t) for c, t in zip(columns, (np.uint64, np.uint64, np.int64, np.int64), strict=True)))


@given(st.lists(st.tuples(st.sampled_from(sorted(TABLES)), st.integers(0, 10**6)), max_size=40))
def test_written_blocks_are_listed_once_and_in_order(choices: list[tuple[int, int]]) -> None:
    directory = _directory()
    keys = [_key(table, number % TABLES[table][0].num_blocks(TABLES[table][1])) for table, number in choices]
    for key in keys:
        positions = directory.positions(np.array([key], np.uint64))
        directory.publish(positions, np.array([key % 1000 + 2]), 3 + key % 2)
        assert directory.pages[positions[0]] == key % 1000 + 2

    def listed(after: int, up_to: int) -> list[int]:
        return [key for chunk in directory.written_blocks(after, up_to) for key in chunk.tolist()]

    assert listed(2, 4) == sorted(set(keys))
    assert listed(2, 3) == sorted({key for key in keys if key % 2 == 0})
    assert listed(4, 9) == []
    directory.forget_written(3)
    assert listed(0, 9) == listed(3, 4) == sorted({key for key in keys if key % 2})


def test_growth_keeps_entries_and_marks_and_leaves_the_old_one_alone() -> None:
    directory = _directory()
    keys = np.array([_key(4, 0), _key(4, 199), _key(7, 3)], np.uint64)
    directory.publish(directory.positions(keys), np.array([11, 12, 13]), 5)
    before = directory.pages.copy()
    grown = directory.with_table(2, WIDE, 10**9)
    assert grown.pages[grown.positions(keys)].tolist() == [11, 12, 13]
    assert np.count_nonzero(grown.pages[: len(before)]) == 3
    assert np.concatenate(list(grown.written_blocks(4, 5))).tolist() == keys.tolist()
    assert grown.layout_id(WIDE) == directory.layout_id(WIDE) != grown.layout_id(LONG)
    np.testing.assert_array_equal(directory.pages, before)
    assert len(directory.tables.bases) == 8
    emptied = grown.emptied()
    assert len(emptied.pages) == len(grown.pages)
    assert grown.size_bytes > emptied.size_bytes >= 4 * WIDE.num_blocks(10**9)


def test_the_newest_epoch_up_to_the_version_is_entered() -> None:
    directory = _directory()
    size = WIDE.block_bytes
    entries = _entries(
        (_key(0, 2), 1, 5, NARROW.block_bytes),
        (_key(4, 3), 1, 6, size),
        (_key(4, 3), 2, 7, size),
        (_key(4, 3), 3, 8, size),
        (_key(5, 0), 1, 9, size),
        (int(META_KEY), 0, 0, 40),
    )
    for version, page in ((1, 6), (2, 7), (3, 8)):
        assert fill_pages(entries, 6, version, directory.tables, directory.pages) == -1
        assert directory.pages[directory.positions(np.array([_key(4, 3)], np.uint64))].tolist() == [page]
    assert np.count_nonzero(directory.pages) == 2


@pytest.mark.parametrize(
    "entry",
    [
        (_key(4, 10**6), 1, 5, WIDE.block_bytes),
        (_key(4, 0), 1, 5, WIDE.block_bytes - 8),
        (_key(4, 0), 1, 0, WIDE.block_bytes),
        (_key(4, 0), 1, 1 << 32, WIDE.block_bytes),
    ],
    ids=["number", "size", "inline", "page"],
)
def test_entries_that_cannot_be_blocks(entry: tuple[int, int, int, int]) -> None:
    directory = _directory()
    entries = _entries((_key(0, 2), 1, 5, NARROW.block_bytes), entry)
    assert fill_pages(entries, 2, 1, directory.tables, directory.pages) == 1


def test_totals_do_not_depend_on_order_and_tell_epochs_apart() -> None:
    def totals(*rows: tuple[int, int]) -> tuple[list[int], list[int]]:
        counts, hashes = np.zeros(3, np.int64), np.zeros(3, np.uint64)
        tally(
            np.array([key for key, _ in rows], np.uint64),
            np.array([epoch for _, epoch in rows], np.uint64),
            counts,
            hashes,
        )
        return counts.tolist(), hashes.tolist()

    a, b = (_key(1, 3), 2), (_key(1, 4), 5)
    assert totals(a, b) == totals(b, a)
    assert totals(a, b)[0] == [0, 2, 0]
    assert totals(a, b)[1] != totals(a, (_key(1, 4), 4))[1]
    assert totals(a, b)[1] != totals((_key(1, 4), 2), (_key(1, 3), 5))[1]
