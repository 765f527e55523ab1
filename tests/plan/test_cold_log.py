"""What a cold tier reads and moves, counted against a loop over lists and sets."""

from collections import Counter

import numpy as np
import pytest

from tierstore.io.segments import geometry
from tierstore.plan.accesses import Accesses, once_a_batch
from tierstore.plan.cold_log import ColdLog, LogShares, Writing, cold_log_of, pages_of_rows
from tierstore.rows import KEY_ROW_BITS, RowLayout

pytestmark = pytest.mark.kernel

LAYOUT = RowLayout(dim=320)
"""Three rows in a page, 45 in a segment."""
WIDE = RowLayout(dim=1250)
"""Two rows in three pages, each on two of them."""
PLAIN = Writing(LAYOUT, 1 << 20)
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

    def __init__(self, layout: RowLayout) -> None:
        self.layout, self.size = layout, layout.rows_per_segment
        self.pages = pages_of_rows(layout)
        self.segments: dict[int, list[int]] = {}
        self.places: dict[int, tuple[object, int]] = {}
        self.next = 0

    def place(self, key: int) -> tuple[object, int]:
        row = key % (1 << KEY_ROW_BITS)
        return self.places.get(key, ((key >> KEY_ROW_BITS, row // self.size), row % self.size))

    def pages_of(self, key: int) -> set[tuple[object, int]]:
        segment, index = self.place(key)
        return {(segment, page) for page in range(self.pages.first[index], self.pages.last[index] + 1)}

    def append(self, keys: list[int]) -> None:
        for first in range(0, len(keys), self.size):
            part, self.next = keys[first : first + self.size], self.next + 1
            self.segments[self.next] = part
            self.places |= {key: (self.next, index) for index, key in enumerate(part)}
        self.segments = {number: keys for number, keys in self.segments.items() if self.live(number)}

    def live(self, number: int) -> list[int]:
        return [key for index, key in enumerate(self.segments[number]) if self.places[key] == (number, index)]

    def needed(self, number: int) -> float:
        """Pages, if the segment were full."""
        return len(self.live(number)) / self.size * self.layout.segment_pages(self.size)

    def clean(self) -> tuple[int, int]:
        pages = {number: self.layout.segment_pages(len(keys)) for number, keys in self.segments.items()}
        allowed = SLACK * len(self.places) + (SLACK - 1) * NUM_ROWS
        excess = sum(pages.values()) - allowed / self.size * self.layout.segment_pages(self.size)
        victims = []
        for number in sorted(pages, key=lambda number: (int(self.size * self.needed(number) / pages[number]), -number)):
            if excess > 0 and self.needed(number) < 0.95 * pages[number]:
                excess -= pages[number] - self.needed(number)
                victims.append(number)
        keys = [key for number in victims for key in self.live(number)]
        if sum(pages[number] for number in victims) <= self.layout.pages_for(len(keys)):
            return 0, 0
        self.append(keys)
        return len(keys), len(victims)


class SlowStore:
    """A cache over the log.

    Attributes:
        is_newer: of the rows in memory, those used longest ago first.
    """

    def __init__(self, layout: RowLayout, capacity: int, together: int) -> None:
        self.log, self.capacity, self.together = SlowLog(layout), capacity, together
        self.is_newer: dict[int, bool] = {}
        self.counts = Counter[str]()

    def write(self, most: int) -> None:
        keys = [key for key, is_newer in self.is_newer.items() if is_newer][:most]
        self.is_newer |= dict.fromkeys(keys, False)
        self.log.append(keys)
        moved, cleaned = self.log.clean()
        self.counts.update(written=len(keys), moved=moved, cleaned=cleaned)

    def look_up(self, keys: list[int]) -> None:
        read = set[tuple[object, int]]()
        for key in keys:
            if key not in self.is_newer:
                pages = self.log.pages_of(key) - read
                read |= pages
                self.counts.update(missed=1, pages=len(pages))
                if len(self.is_newer) == self.capacity:
                    oldest = next(iter(self.is_newer))
                    if self.is_newer[oldest]:
                        self.write(self.together)
                    del self.is_newer[oldest]
            self.is_newer.pop(key, None)
            self.is_newer[key] = self.together > 0


def slow_shares(accesses: Accesses, capacity: int, writing: Writing, *, is_written: bool) -> LogShares | None:
    together = writing.transaction_rows(capacity)
    store = SlowStore(writing.layout, capacity, is_written * together)
    for batch in range(accesses.num_batches):
        if batch == accesses.num_batches // 2:
            if len(store.is_newer) < capacity:
                return None
            store.counts.clear()
        store.look_up(accesses.keys[accesses.starts[batch] : accesses.starts[batch + 1]].tolist())
    counts = store.counts
    written = max(counts["written"], 1)
    return LogShares(counts["pages"] / counts["missed"], counts["moved"] / written, counts["cleaned"] / written)


def drawn_batches(seed: int, *, num_batches: int = 100, batch: int = 300) -> Accesses:
    generator = np.random.default_rng(seed)
    rows = generator.zipf(1.2, (num_batches, batch)) % 2000
    tables = generator.integers(0, 2, (num_batches, batch))
    return batches_of(*(rows | tables << KEY_ROW_BITS).tolist())


@pytest.mark.parametrize("layout", [LAYOUT, WIDE])
@pytest.mark.parametrize("capacity", [256, 1024])
def test_as_much_as_a_loop_counts(layout: RowLayout, capacity: int) -> None:
    """Segments that are equally empty are cleaned in another order, and what is moved is a little more or less."""
    accesses, writing = drawn_batches(capacity), Writing(layout, 1 << 17)
    for is_written in (False, True):
        expected = slow_shares(accesses, capacity, writing, is_written=is_written)
        found = ColdLog(accesses, NUM_ROWS, is_written=is_written).shares(capacity, writing)
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
    of_segments = Writing(LAYOUT, 1 << 16)
    packed, scattered = (ColdLog(batches, NUM_ROWS, is_written=each).shares(512, of_segments) for each in (True, False))
    assert packed == (pytest.approx(1 / 3, rel=0.01), 0, 0), "and segments are overwritten whole"
    assert scattered is not None
    assert scattered.pages > 0.95


def test_rows_that_have_not_changed_lie_by_their_ids() -> None:
    near = [[*range(first, first + 15)] for first in range(0, 40 * 15, 15)]
    tables = [[key for row in batch[:6] for key in (row, row | 1 << KEY_ROW_BITS)] for batch in near]
    for batches, pages in ((near, 5 / 15), (tables, 4 / 12)):
        for is_written in (False, True):
            shares = ColdLog(batches_of(*batches), NUM_ROWS, is_written=is_written).shares(64, PLAIN)
            assert shares is not None
            assert shares.pages == pytest.approx(pages, rel=0.02)
            assert shares.moved == 0, "no row is overwritten"


def test_between_sizes_on_a_line_and_beyond_them_as_at_the_largest() -> None:
    accesses = drawn_batches(5)
    found = ColdLog(accesses, NUM_ROWS, is_written=True)
    small, middle, large = (found.shares(size, PLAIN) for size in (64, 76.1, 91))
    assert small is not None
    assert middle is not None
    assert large is not None
    for low, between, high in zip(small, middle, large, strict=True):
        assert between == pytest.approx((low + high) / 2, rel=0.01)
    sizes = [round(2 ** (step / 2)) for step in range(26)]
    ends = [slow_shares(accesses, size, PLAIN, is_written=False) for size in (1, *sizes)]
    unwritten = ColdLog(accesses, NUM_ROWS, is_written=False)
    assert unwritten.shares(1e9, PLAIN) == [share for share in ends if share is not None][-1]
    assert unwritten.shares(0, PLAIN) == ends[0]


def test_rows_that_fit_leave_nothing_to_count() -> None:
    assert ColdLog(batches_of([1], [1], [1]), NUM_ROWS, is_written=True).shares(4, PLAIN) is None


def test_a_cache_that_fills_late_is_taken_for_a_smaller_one() -> None:
    """Of 40 batches of rows of their own the last leave a cache of 512, which the first half does not fill."""
    batches = batches_of(*([*range(first, first + 15)] for first in range(0, 600 * 15, 15 * 15)))
    found = ColdLog(batches, NUM_ROWS, is_written=True)
    assert found.shares(512, PLAIN) == found.shares(256, PLAIN) is not None


def test_a_sample_does_not_tell() -> None:
    assert cold_log_of(batches_of([1, 2], rate=0.5), 1, is_written=True) is None
    assert cold_log_of(batches_of([]), 1, is_written=True) is None
    assert cold_log_of(batches_of([1]), 1, is_written=True) is not None
