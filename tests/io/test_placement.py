"""Where rows lie, against a dict."""

import struct

import numpy as np
import pytest

from tests.conformance.cold_tier import TABLES, keys_of
from tests.io.test_conformance import mixed_placement
from tierstore.io.placement import Area, Placement, unpack_placement
from tierstore.rows import MAX_ROWS, RowLayout


def known() -> Placement:
    """One that knows its tables."""
    placement = mixed_placement()
    for table, (layout, num_rows) in TABLES.items():
        placement.stored_rows(table, layout, num_rows)
    return placement


@pytest.mark.kernel
def test_every_row_has_one_place_and_every_place_one_row() -> None:
    placement = known()
    moved = {key: area.start + position for area in placement.areas for position, key in enumerate(area.keys.tolist())}
    keys = np.concatenate([keys_of(table, np.arange(num_rows)) for table, (_, num_rows) in TABLES.items()])
    keys = np.random.default_rng(1).permutation(keys)
    places = placement.places(keys)
    assert places.tolist() == [moved.get(key, key) for key in keys.tolist()]
    assert len(set(places.tolist())) == len(keys)
    assert np.array_equal(placement.rows_at(places), keys)
    assert (placement.num_rows, len(moved)) == (3490, 3490)


@pytest.mark.kernel
def test_places_without_a_row_are_left_out() -> None:
    placement = known()
    area = placement.areas[0]
    left = area.keys[:50]
    assert not len(placement.rows_at(left)), "rows that were moved are still where they were"
    behind = np.array([area.start - 1, area.start + len(area.keys), keys_of(0, [1000])[0]])
    assert not len(placement.rows_at(behind))
    assert placement.row_at(int(behind[1])) == behind[1]
    assert placement.row_at(area.start + 3) == area.keys[3]


@pytest.mark.kernel
def test_what_is_no_row_has_no_place() -> None:
    placement = known()
    for row in (1000, 1008, placement.areas[0].first, MAX_ROWS - 1):
        assert placement.places(keys_of(0, [row])) == keys_of(0, [MAX_ROWS - 1])
    strange = np.array([-1, np.int64(9) << 40])
    assert np.array_equal(placement.places(strange), strange)


def test_a_placement_is_what_was_packed() -> None:
    placement = mixed_placement()
    again = unpack_placement(placement.pack())
    for one, other in zip(placement.areas, again.areas, strict=True):
        assert one[:2] == other[:2]
        assert np.array_equal(one.keys, other.keys)
    data = placement.pack()
    for broken in (data[:-8], data + bytes(8), data[:8]):
        with pytest.raises((ValueError, struct.error), match=r"cut short|wrong length|unpack_from"):
            unpack_placement(broken)


def test_memory_is_what_is_said() -> None:
    rows = 1 << 20
    keys = np.random.default_rng(0).permutation(rows)[:5000].astype(np.int64)
    size = Placement([Area(0, rows, keys)]).size_bytes
    assert 12 * 5000 < size <= 12 * 5000 + rows // 4 + 100


@pytest.mark.parametrize(
    ("areas", "reason"),
    [
        ([Area(0, 15, np.array([3, 4, 3]))], "two places"),
        ([Area(0, 15, np.array([-3]))], "cannot be"),
        ([Area(0, MAX_ROWS - 1, np.array([3]))], "no room"),
        ([Area(0, 15, np.array([], np.int64))], "out of range"),
        ([Area(0, 0, np.array([1]))], "out of range"),
        ([Area(0, 15, np.array([1])), Area(1, 15, np.array([2]))], "two areas"),
        ([Area(0, 15, np.array([1])), Area(0, 30, keys_of(1, [2]))], "behind one table"),
    ],
)
def test_areas_that_cannot_be(areas: list[Area], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Placement(areas)


def test_tables_that_do_not_fit() -> None:
    layout = RowLayout(dim=64)
    placement = Placement([Area(0, 30, np.array([3, 17, 25]))])
    assert placement.stored_rows(0, layout, 26) == 33
    assert placement.stored_rows(7, layout, 26) == 26
    with pytest.raises(ValueError, match="row 25 of table 0, which has 25 rows"):
        placement.stored_rows(0, layout, 25)
    with pytest.raises(ValueError, match="begins at 30"):
        placement.stored_rows(0, layout, 31)
