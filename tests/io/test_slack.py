"""However a store is rewritten, a commit leaves its segments no larger than the slack allows."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import LONG, NARROW, WIDE, check_rows, commit, keys_of, write_rows
from tests.io.support import open_tier
from tierstore import layout as layouts
from tierstore.io import log, places, row_file, writer
from tierstore.io.lmdb import LmdbColdTier
from tierstore.layout import RowLayout


@pytest.mark.parametrize(("slack", "writes"), [(1.1, 1), (1.4, 3)])
@pytest.mark.parametrize("num_rows", [1, 40, 6000])
def test_a_commit_leaves_no_more_than_the_slack(tmp_path: Path, slack: float, num_rows: int, writes: int) -> None:
    generator = np.random.default_rng(0)
    generations = np.zeros(num_rows, np.int64)
    with contextlib.closing(open_tier(tmp_path, slack=slack)) as tier:
        tier.add_table(0, WIDE, num_rows)
        for version in range(1, 9):
            rows = generator.permutation(num_rows)[: num_rows if version == 1 else -(-num_rows // 2)]
            for part in np.array_split(rows, writes):
                if len(part):
                    write_rows(tier, WIDE, keys_of(0, part), version)
            generations[rows] = version
            commit(tier, b"")
            with tier.lease() as (_, found):
                segments = found.segments[WIDE]
                per_segment = WIDE.segment_pages(WIDE.rows_per_segment)
                needed = num_rows * per_segment / WIDE.rows_per_segment
                assert segments.pages <= slack * needed + per_segment, f"version {version}"
        for version in np.unique(generations).tolist():
            check_rows(tier, WIDE, keys_of(0, np.flatnonzero(generations == version)), version)


def test_a_few_rows_of_a_version_do_not_keep_others_from_being_cleaned(tmp_path: Path) -> None:
    """The emptiest segment has all that could be moved for a kept version, and would be no smaller elsewhere."""
    size, generator = WIDE.rows_per_segment, np.random.default_rng(0)
    pages = WIDE.segment_pages(size)
    with contextlib.closing(open_tier(tmp_path, slack=1.4)) as tier:
        tier.add_table(0, WIDE, 20 * size + 1)
        for rows in (1 + np.arange(20 * size), np.arange(1)):
            write_rows(tier, WIDE, keys_of(0, rows), 1)
        commit(tier, b"")
        for number in range(60):
            write_rows(tier, WIDE, keys_of(0, 1 + generator.permutation(20 * size)[:size]), 2)
            with tier.lease() as (_, found):
                segments = found.segments[WIDE]
                stored = segments.pages - segments.arrays.pages[segments.dead].sum()
                assert stored <= (1.4 * segments.rows / size + 2) * pages, f"write {number}"


@pytest.mark.parametrize("layout", [WIDE, NARROW, LONG], ids=["wide", "narrow", "long"])
def test_the_file_stays_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: RowLayout) -> None:
    """docs/durability.md's, of rows as they are stored: they are rewritten at random, and committed now and then."""
    least = 1 << 20
    monkeypatch.setattr(row_file, "GROWTH_BYTES", least)
    monkeypatch.setattr(places, "SMALL_PAGES", 256)
    generator, slack, bound, most = np.random.default_rng(0), 1.4, 0.0, 0.0
    num_rows = int((16 << 20) / layout.stored_row_bytes)
    a_write = layout.rows_per_segment
    transaction = a_write * layout.stored_row_bytes * (1 + 1 / (slack - 1))
    with contextlib.closing(open_tier(tmp_path, slack=slack)) as tier:
        tier.add_table(0, layout, num_rows)
        for part in np.array_split(np.arange(num_rows), num_rows // a_write):
            write_rows(tier, layout, keys_of(0, part), 1)
        for version in range(2, 7):
            commit(tier, b"")
            uncommitted = np.zeros(num_rows, np.bool_)
            for _ in range(num_rows // a_write // 3):
                changed = generator.choice(num_rows, a_write, replace=False)
                write_rows(tier, layout, keys_of(0, changed), version)
                uncommitted[changed] = True
                rows_bytes = (num_rows + np.count_nonzero(uncommitted)) * layout.stored_row_bytes
                growth = min(max(least, slack * rows_bytes / 32), 4 * least)
                bound = max(bound, (slack + 0.1) * rows_bytes + 3 * (growth + transaction))
                most = max(most, tier.path.stat().st_size / bound)
        assert 0.8 < most <= 1


_SCALE = 8  # Segments, and all that is counted in their pages, are so many times smaller: 64 MB hold the tree of 500 MB
_NUM_ROWS = 16_000
_ROWS_A_WRITE = 64
_COUNTS = Path("/proc/self/io")


def _written_bytes() -> int:
    return int(next(line.split()[1] for line in _COUNTS.read_text().splitlines() if line.startswith("wchar")))


class _Counter:
    def __init__(self, tier: LmdbColdTier) -> None:
        self._tier = tier
        self._last = self._now()

    def _now(self) -> tuple[int, int]:
        with self._tier.lease_tree() as snapshot:
            counters = self._tier.counters()
            return _written_bytes() - counters.bytes_written - counters.bytes_moved, snapshot.txn_id

    def pages_a_transaction(self) -> float:
        (before, first), self._last = self._last, self._now()
        return (self._last[0] - before) / 4096 / (self._last[1] - first)


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> RowLayout:
    for module, name in (
        (layouts, "SEGMENT_PAGES"),
        (row_file, "GROWTH_BYTES"),
        (log, "DELETED_PAGES"),
        (writer, "DELETED_PAGES"),
        (writer, "_CLEANED_PAGES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // _SCALE)
    monkeypatch.setattr(places, "SMALL_PAGES", 0)
    layout = RowLayout(dim=480)
    assert layout.rows_per_segment == 2
    return layout


@pytest.mark.skipif(not _COUNTS.exists(), reason="the kernel does not count what a process writes")
def test_few_pages_are_written_beside_segments(tmp_path: Path, layout: RowLayout) -> None:
    generator, rates = np.random.default_rng(0), []
    with contextlib.closing(open_tier(tmp_path)) as tier:
        tier.add_table(0, layout, _NUM_ROWS)
        counter = _Counter(tier)
        for keys in np.split(keys_of(0, np.arange(_NUM_ROWS)), _NUM_ROWS // _ROWS_A_WRITE):
            write_rows(tier, layout, keys, 1)
        commit(tier, b"")
        assert counter.pages_a_transaction() <= 6
        for version in range(2, 10):
            for _ in range(60):
                keys = keys_of(0, generator.choice(_NUM_ROWS, _ROWS_A_WRITE, replace=False))
                write_rows(tier, layout, keys, version)
            commit(tier, b"")
            rates.append(counter.pages_a_transaction())
        assert np.mean(rates[-4:]) <= 12, rates
