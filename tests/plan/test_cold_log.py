"""What a cold tier reads and moves, counted against a loop over lists and sets."""

from collections import OrderedDict

import numpy as np
import pytest

from tierstore.io.segments import geometry
from tierstore.plan.accesses import Accesses, once_a_batch
from tierstore.plan.cold_log import ColdLog, LogShares, cold_log_of, pages_of_rows
from tierstore.rows import KEY_ROW_BITS, RowLayout

pytestmark = pytest.mark.kernel

LAYOUT = RowLayout(dim=320)
"""Three rows in a page, 45 in a segment."""
WIDE = RowLayout(dim=1250)
"""Two rows in three pages, each on two of them."""
SLACK = 1.4
NUM_ROWS = 2000
"""On disk."""


def batches_of(*batches: list[int], rate: float = 1.0) -> Accesses:
    """Keys, as they are."""
    keys = np.array([key for batch in batches for key in batch], np.int64)
    starts = np.append(0, np.cumsum([len(batch) for batch in batches]))
    return once_a_batch(Accesses(keys, starts, ("a", "b"), rate))


class SlowLog:
    """Places are ``(segment, index)``; segments of rows that have not changed are named by table and number."""

    def __init__(self, layout: RowLayout, *, is_written: bool) -> None:
        self.size, self.is_written = layout.rows_per_segment, is_written
        self.pages = pages_of_rows(layout)
        self.segments: dict[int, list[int]] = {}
        self.places: dict[int, tuple[object, int]] = {}
        self.open: dict[str, int | None] = {"leaving": None, "moved": None}
        self.next = 0

    def place(self, key: int) -> tuple[object, int]:
        row = key % (1 << KEY_ROW_BITS)
        return self.places.get(key, ((key >> KEY_ROW_BITS, row // self.size), row % self.size))

    def pages_of(self, keys: list[int]) -> int:
        found = set()
        for segment, index in map(self.place, keys):
            found |= {(segment, page) for page in range(self.pages.first[index], self.pages.last[index] + 1)}
        return len(found)

    def append(self, key: int, kind: str) -> None:
        number = self.open[kind]
        if number is None or len(self.segments[number]) == self.size:
            number, self.open[kind], self.next = self.next, self.next, self.next + 1
            self.segments[number] = []
        self.places[key] = number, len(self.segments[number])
        self.segments[number].append(key)

    def live(self, number: int) -> list[int]:
        return [key for index, key in enumerate(self.segments[number]) if self.places[key] == (number, index)]

    def clean(self) -> tuple[int, int]:
        """One segment after another, the emptiest first."""
        moved = cleaned = 0
        while len(self.segments) * self.size > SLACK * len(self.places) + (SLACK - 1) * NUM_ROWS:
            closed = [number for number in self.segments if number not in self.open.values()]
            emptiest = min(closed, key=lambda number: len(self.live(number)), default=None)
            if emptiest is None or len(keys := self.live(emptiest)) == self.size:
                break
            moved, cleaned = moved + len(keys), cleaned + bool(keys)
            for key in keys:
                self.append(key, "moved")
            del self.segments[emptiest]
        return moved, cleaned


def slow_shares(accesses: Accesses, capacity: int, layout: RowLayout, *, is_written: bool) -> LogShares | None:
    log, cached = SlowLog(layout, is_written=is_written), OrderedDict[int, None]()
    missed = pages = moved = cleaned = 0
    for batch in range(accesses.num_batches):
        if batch == accesses.num_batches // 2:
            if len(cached) < capacity:
                return None
            missed = pages = moved = cleaned = 0
        missing = []
        for key in accesses.keys[accesses.starts[batch] : accesses.starts[batch + 1]].tolist():
            if key not in cached:
                missing.append(key)
                if len(cached) == capacity:
                    out, _ = cached.popitem(last=False)
                    if is_written:
                        log.append(out, "leaving")
            cached[key] = None
            cached.move_to_end(key)
        missed, pages = missed + len(missing), pages + log.pages_of(missing)
        rows, segments = log.clean()
        moved, cleaned = moved + rows, cleaned + segments
    return LogShares(pages / missed, moved / missed, cleaned / missed)


def drawn_batches(seed: int, *, num_batches: int = 100, batch: int = 300) -> Accesses:
    generator = np.random.default_rng(seed)
    rows = generator.zipf(1.2, (num_batches, batch)) % 2000
    tables = generator.integers(0, 2, (num_batches, batch))
    return batches_of(*(rows | tables << KEY_ROW_BITS).tolist())


@pytest.mark.parametrize("layout", [LAYOUT, WIDE])
@pytest.mark.parametrize("capacity", [256, 1024])
def test_as_much_as_a_loop_counts(layout: RowLayout, capacity: int) -> None:
    """Segments that are equally empty are cleaned in another order, and what is moved is a little more or less."""
    accesses = drawn_batches(capacity)
    for is_written in (False, True):
        expected = slow_shares(accesses, capacity, layout, is_written=is_written)
        found = ColdLog(accesses, NUM_ROWS, is_written=is_written).shares(capacity, layout)
        assert expected is not None
        assert found is not None
        assert found.pages == pytest.approx(expected.pages, rel=1e-2 if is_written else 1e-12)
        assert found.moved == pytest.approx(expected.moved, rel=0.05)
        assert found.cleaned == pytest.approx(expected.cleaned, rel=0.05)
        assert (found.moved > 0.03) == is_written


def test_where_a_row_is_read() -> None:
    """As a segment has its rows: with their keys and checksums, where a block has several pages."""
    assert (geometry(LAYOUT, 0).rows_per_block, LAYOUT.rows_per_segment) == (3, 45)
    pages = pages_of_rows(LAYOUT)
    assert pages.first.tolist() == pages.last.tolist() == [index // 3 for index in range(45)]
    geo, pages = geometry(WIDE, 0), pages_of_rows(WIDE)
    assert (geo.rows_per_block, geo.pages_per_block) == (2, 3)
    assert pages.first[:4].tolist() == [0, 1, 3, 4]
    assert pages.last[:4].tolist() == [1, 2, 4, 5]


def test_rows_that_leave_together_are_read_together() -> None:
    """Whatever their ids: batches of rows from all over, each again after all others."""
    rows = np.random.default_rng(0).permutation(45 * 60).reshape(60, 45)
    batches = batches_of(*(rows.tolist() * 6))
    packed, scattered = (ColdLog(batches, NUM_ROWS, is_written=each).shares(45, LAYOUT) for each in (True, False))
    assert packed == (pytest.approx(1 / 3, rel=0.01), 0, 0), "and segments are overwritten whole"
    assert scattered is not None
    assert scattered.pages > 0.95


def test_rows_that_have_not_changed_lie_by_their_ids() -> None:
    near = [[*range(first, first + 15)] for first in range(0, 40 * 15, 15)]
    tables = [[key for row in batch[:6] for key in (row, row | 1 << KEY_ROW_BITS)] for batch in near]
    for batches, pages in ((near, 5 / 15), (tables, 4 / 12)):
        for is_written in (False, True):
            shares = ColdLog(batches_of(*batches), NUM_ROWS, is_written=is_written).shares(64, LAYOUT)
            assert shares is not None
            assert shares.pages == pytest.approx(pages, rel=0.02)
            assert shares.moved == 0, "no row is overwritten"


def test_between_sizes_on_a_line_and_beyond_them_as_at_the_largest() -> None:
    accesses = drawn_batches(5)
    found = ColdLog(accesses, NUM_ROWS, is_written=True)
    small, middle, large = (found.shares(size, LAYOUT) for size in (64, 76.1, 91))
    assert small is not None
    assert middle is not None
    assert large is not None
    for low, between, high in zip(small, middle, large, strict=True):
        assert between == pytest.approx((low + high) / 2, rel=0.01)
    sizes = [round(2 ** (step / 2)) for step in range(26)]
    ends = [slow_shares(accesses, size, LAYOUT, is_written=False) for size in (1, *sizes)]
    unwritten = ColdLog(accesses, NUM_ROWS, is_written=False)
    assert unwritten.shares(1e9, LAYOUT) == [share for share in ends if share is not None][-1]
    assert unwritten.shares(0, LAYOUT) == ends[0]


def test_rows_that_fit_leave_nothing_to_count() -> None:
    assert ColdLog(batches_of([1], [1], [1]), NUM_ROWS, is_written=True).shares(4, LAYOUT) is None


def test_a_cache_that_fills_late_is_taken_for_a_smaller_one() -> None:
    """Of 40 batches of rows of their own the last leave a cache of 512, which the first half does not fill."""
    batches = batches_of(*([*range(first, first + 15)] for first in range(0, 600 * 15, 15 * 15)))
    found = ColdLog(batches, NUM_ROWS, is_written=True)
    assert found.shares(512, LAYOUT) == found.shares(256, LAYOUT) is not None


def test_a_sample_does_not_tell() -> None:
    assert cold_log_of(batches_of([1, 2], rate=0.5), 1, is_written=True) is None
    assert cold_log_of(batches_of([]), 1, is_written=True) is None
    assert cold_log_of(batches_of([1]), 1, is_written=True) is not None
